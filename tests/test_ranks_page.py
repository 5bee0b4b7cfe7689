"""What people see of their jobs in Dask's dashboard, in a real browser."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.request import urlopen

import cloudpickle
import pytest
from distributed import Client, LocalCluster
from playwright.sync_api import expect
from waiting import GIVE_UP_S, until

import daskrun
from daskrun import dashboard
from daskrun.claims import Request, Worker
from daskrun.page import Ranks
from daskrun.protocol import JobState
from daskrun.scheduler import history_of

LAPTOP, PHONE, PANE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}, {"width": 400, "height": 300}
DATA = """name => {
    const source = window.Bokeh?.documents[0]?.get_model_by_name(name)
    const columns = Object.entries(source?.data ?? {})
    return Object.fromEntries(columns.map(([key, values]) => [key, Array.from(values)]))
}"""
SPAN = "() => (range => range.end - range.start)(Bokeh.documents[0].roots()[0].select({type: 'Figure'})[0].y_range)"
FIRST_X = "() => Bokeh.documents[0].roots()[0].select({type: 'Figure'})[0].x_range.start"

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # another scheduler's process cannot import it


def address(client, page="/ranks"):
    return client.dashboard_link.removesuffix("/status") + page


@pytest.fixture(autouse=True)
def nothing_kept(request):
    """Forget the jobs of other tests: one that they have made up may never end."""
    if "client" in request.fixturenames:
        client = request.getfixturevalue("client")
        client.run_on_scheduler(lambda dask_scheduler: history_of(dask_scheduler).jobs.clear())


@contextmanager
def opened(browser, url, viewport=LAPTOP):
    page = browser.new_page(viewport=viewport)
    page.set_default_timeout(1000 * GIVE_UP_S)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    assert not errors


def row_of(page, rank):
    return page.locator("tr", has=page.get_by_role("cell", name=re.compile(rf"^\W*{rank}$"))).last


def test_lines_grow_a_death_is_marked_the_next_attempt_goes_on_and_a_hang_is_told(client, browser, tmp_path):
    go_on = [str(tmp_path / name) for name in ("killed", "freed")]

    def train():
        import os
        import time

        import torch
        import torch.distributed as dist

        rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for step in range(1 + 2 * attempt, 6):
            dist.all_reduce(torch.ones(10))
            daskrun.log_metrics(step=step, loss=1 / step + rank, lr=0.1)
            if rank == 1 and step == 3:
                while not os.path.exists(go_on[attempt]):
                    time.sleep(0.05)
                if not attempt:
                    os.kill(os.getpid(), signal.SIGKILL)

    with opened(browser, address(client)) as page, daskrun.launch(client, train, max_restarts=1) as job:
        until(lambda: page.evaluate(DATA, "lines").get("xs") == [[1, 2, 3], [1, 2, 3]])
        assert [line[2] for line in page.evaluate(DATA, "lines")["ys"]] == [pytest.approx(1 / 3), pytest.approx(4 / 3)]
        open(go_on[0], "w").close()
        page.get_by_text("restarts 1 of 1: running").wait_for()
        until(lambda: page.evaluate(DATA, "lines")["xs"][2:] == [[3], [3]])
        assert page.evaluate(DATA, "deaths") == {"x": [3], "y": [pytest.approx(4 / 3)], "alpha": [0.45]}
        assert page.evaluate(DATA, "restarts") == {"x": [3]}
        assert page.evaluate(DATA, "ends")["x"] == [3] * 4  # a line of one point would not be seen
        page.get_by_role("button", name="Who waits?").click()
        page.get_by_text("Rank 0 waits in all_reduce (collective 2, shape [10])").wait_for()
        page.get_by_text("in train").first.wait_for()
        page.get_by_label("Metric").select_option("lr")
        until(lambda: page.evaluate(DATA, "lines")["ys"][0] == [0.1] * 3)
        open(go_on[1], "w").close()
        job.result()
        page.get_by_text("restarts 1 of 1: finished").wait_for()
        page.get_by_role("cell", name="finished; earlier: WorkerDied: Rank 1 died").wait_for()
    assert len(job.failures) == 1


def test_the_chart_shows_the_loss_once_there_is_one_and_then_what_the_viewer_chooses(client, browser, tmp_path):
    go_on = str(tmp_path / "go-on")

    def train():
        daskrun.log_metrics(called=1.0)
        while not os.path.exists(go_on):
            time.sleep(0.05)
        daskrun.log_metrics(loss=0.5)

    with opened(browser, address(client)) as page, daskrun.launch(client, train, backend=None) as job:
        page.get_by_role("columnheader", name="called").wait_for()
        open(go_on, "w").close()
        page.get_by_role("columnheader", name="loss").wait_for()
        page.get_by_label("Metric").select_option("called")
        page.get_by_role("columnheader", name="called").wait_for()
        job.result()
        page.get_by_text("finished").first.wait_for()
        assert page.get_by_role("columnheader", name="called").count() == 1


def test_who_waits_is_asked_by_a_click_and_by_nothing_else(client, browser, tmp_path):
    go_on = str(tmp_path / "go-on")

    def wait():
        while not os.path.exists(go_on):
            time.sleep(0.05)

    with daskrun.launch(client, wait, backend=None), opened(browser, address(client, "/ranks?who-waits")) as page:
        row_of(page, 1).get_by_text("running").wait_for()
        page.get_by_role("button", name="Who waits?").click()
        page.get_by_text("in wait").first.wait_for()
        row_of(page, 0).get_by_text(re.compile(r"\d MiB")).wait_for()
        open(go_on, "w").close()


def test_what_users_have_written_is_text(client, browser):
    def train():
        daskrun.log_metrics(**{"<b>bold metric</b>": 1.0})
        raise ValueError("<b>bold</b> <img src=x onerror=alert(1)>")

    train.__name__ = "<b>bold name</b>"
    with pytest.raises(ValueError, match="bold"):
        daskrun.run(client, train, backend=None)
    for path in (dashboard.PAGE, dashboard.PANE):
        with opened(browser, address(client, path)) as page:
            page.get_by_text("<b>bold name</b>").first.wait_for()
            page.get_by_role("columnheader", name="<b>bold metric</b>").wait_for()
            assert not page.locator("b", has_text="bold").filter(has_not_text="<b>").count()
            assert not page.locator("img[src=x]").count()
            if path == dashboard.PAGE:
                page.get_by_role("cell", name="ValueError: <b>bold</b> <img src=x onerror=alert(1)>").first.wait_for()


def make_up(n_ranks, dask_scheduler=None):
    """Tell the scheduler of a job with many ranks, of which one is dead and one lags."""
    history, name, then = history_of(dask_scheduler), f"made-up-{n_ranks}", time.monotonic() - 2000
    history.asks(Request(name, "nobody", attempts=3))
    workers = [
        Worker(f"tcp://10.0.0.{rank}:1", f"{rank}", f"{rank}", f"10.0.0.{rank}", str(rank)) for rank in range(n_ranks)
    ]
    history.begins(name, workers)
    for rank in range(n_ranks):
        history.hears("began", name, [0, rank, ""], then)
        for step in range(5 if rank == 3 else 20):
            row = {"rank": rank, "attempt": 0, "step": step, "loss": 1 / (step + 1) + rank / 50}
            history.hears("row", name, [row], then + 100 * step)  # a slow browser changes little
    history.hears("gone", name, ["5"], then + 2000)


@pytest.fixture
def many(client):
    client.run_on_scheduler(make_up, 64)
    yield
    client.run_on_scheduler(lambda dask_scheduler: history_of(dask_scheduler).ends("made-up-64", JobState.FINISHED))


@pytest.mark.weekly
def test_64_ranks_are_readable_on_a_laptop_and_on_a_phone(client, browser, many):
    for viewport in (LAPTOP, PHONE):
        with opened(browser, address(client), viewport) as page:
            row_of(page, 63).wait_for()
            expect(row_of(page, 5).get_by_text("dead")).to_have_css("color", "rgb(176, 0, 32)")
            expect(row_of(page, 3).locator(".late")).to_have_count(1)
            expect(row_of(page, 2).locator(".late")).to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            lines = page.evaluate(DATA, "lines")
            assert len(lines["xs"]) == 64 and len(set(lines["color"])) == 7


@pytest.mark.weekly
def test_axe_finds_nothing_wrong(client, browser, many):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with opened(browser, address(client)) as page:
        row_of(page, 63).wait_for()
        ours = {"include": [".content"]}  # Dask's own menu is around it
        found = axe.Axe().run(page, context=ours).response["violations"]
        assert not found, json.dumps(found, indent=1)


def test_a_chosen_job_that_is_no_longer_kept_gives_way_to_the_newest(client):
    def shown(dask_scheduler):
        page, jobs = Ranks(dask_scheduler), history_of(dask_scheduler).jobs
        page.update()
        page._job.value = "made-up-3"
        page.update()
        chosen = page._ranks.text.count("<tr>")
        jobs.pop("made-up-3")
        page.update()
        return chosen, page._ranks.text.count("<tr>"), page._job.value

    for n_ranks in (3, 4):
        client.run_on_scheduler(make_up, n_ranks)
    assert client.run_on_scheduler(shown) == (4, 5, "the newest")  # rows: a head, and a row for each rank


def test_an_answer_is_shown_for_its_own_attempt_alone(client):
    def said(dask_scheduler):
        page, history = Ranks(dask_scheduler), history_of(dask_scheduler)
        page._answer = "Who waits.", "made-up-2", 0
        page.update()
        before = page._said.text
        workers = [rank.worker for rank in history.jobs["made-up-2"].ranks]
        history.ends("made-up-2", JobState.ENDING, "WorkerDied")
        history.asks(Request("made-up-2", "nobody", attempt=1, attempts=3))
        history.begins("made-up-2", workers)
        page.update()
        return before, page._said.text

    client.run_on_scheduler(make_up, 2)
    assert client.run_on_scheduler(said) == ("Who waits.", "")


def test_the_menu_and_jupyterlab_offer_it_and_the_pane_shows_the_newest_job(client, browser):
    daskrun.run(client, int, backend=None)
    with urlopen(address(client, "/individual-plots.json")) as answer:
        assert json.load(answer)["Individual Ranks"] == dashboard.PANE
    with opened(browser, address(client, "/status")) as page:
        page.get_by_role("link", name="Ranks", exact=True).first.click()
        page.get_by_role("cell", name="finished").first.wait_for()
    with opened(browser, address(client, dashboard.PANE), PANE) as page:
        page.get_by_text(": finished").wait_for()
        row_of(page, 1).get_by_text("finished").wait_for()
        expect(page.get_by_role("columnheader")).to_have_text(
            ["rank", "state", "row", "last heard", "CPU", "memory", "worker", "output"]
        )


def test_each_scheduler_of_a_process_has_it_in_its_menu(client):
    for _ in range(2):
        with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
            with Client(cluster) as another:
                another.run_on_scheduler(dashboard.show)
                another.run_on_scheduler(dashboard.show)
            with urlopen(f"{cluster.dashboard_link}") as answer:
                assert answer.read().decode().count('<a href="ranks">') == 1


@pytest.mark.filterwarnings("ignore:Port 8787")
def test_a_scheduler_without_a_dashboard_has_no_page_and_jobs_run():
    settings = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        assert daskrun.run(client, int, backend=None) == [0]


def test_a_preload_gives_a_scheduler_the_page_which_waits_for_the_first_job(browser, tmp_path):
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--preload", "daskrun.dashboard"]
    command += ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    command += ["--dashboard-prefix", "behind", "--scheduler-file", file := str(tmp_path / "scheduler.json")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: (tmp_path / "scheduler.json").exists())
            with Client(scheduler_file=file) as client:
                url = f"http://127.0.0.1:{client.scheduler_info()['services']['dashboard']}/behind"
                for path in (dashboard.PAGE, dashboard.PANE):
                    with opened(browser, url + path) as page:
                        page.get_by_text("No job yet").wait_for()
                        expect(page.get_by_role("button", name="Who waits?")).to_be_hidden()
                        client.run_on_scheduler(make_up, 3 if path == dashboard.PAGE else 4)
                        row_of(page, 2).get_by_text("running").wait_for()
                        until(lambda page=page: page.evaluate(DATA, "lines")["xs"])
                        client.run_on_scheduler(lambda dask_scheduler: history_of(dask_scheduler).jobs.clear())
        finally:
            process.terminate()
