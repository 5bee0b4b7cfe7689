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
from daskrun.page import AGAIN, CHANGED, LOST, OVER, Answer, Ranks
from daskrun.scheduler import record_of
from daskrun.tables import COLOURS
from daskrun.why.look import Look

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
        client.run_on_scheduler(lambda dask_scheduler: record_of(dask_scheduler).jobs.clear())


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


def test_lines_grow_a_death_is_marked_the_next_attempt_goes_on_and_a_hang_is_told(
    client, browser, tmp_path, monkeypatch
):
    monkeypatch.setattr("daskrun.progress.HANGS", 0.2)
    go_on = [str(tmp_path / name) for name in ("killed", "freed", "ends")]

    def train():
        import os
        import signal
        import time

        import torch
        import torch.distributed as dist

        rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if not attempt:
            daskrun.log_metrics(step=1, seldom=7.0)
        for step in range(1 + 2 * attempt, 6):
            dist.all_reduce(torch.ones(10))
            daskrun.log_metrics(step=step, loss=1 / step + rank, lr=0.1)
            if rank == 1 and step == 3:
                while not os.path.exists(go_on[attempt]):
                    time.sleep(0.05)
                if not attempt:
                    os.kill(os.getpid(), signal.SIGKILL)
            while step == 4 and not os.path.exists(go_on[2]):
                time.sleep(0.05)

    with opened(browser, address(client)) as page, daskrun.launch(client, train, max_restarts=1) as job:
        until(lambda: page.evaluate(DATA, "lines").get("xs") == [[1, 2, 3], [1, 2, 3]])
        assert [line[2] for line in page.evaluate(DATA, "lines")["ys"]] == [pytest.approx(1 / 3), pytest.approx(4 / 3)]
        page.get_by_role("cell", name="running, and no rank logs anything").wait_for()
        page.get_by_text(": running, and no rank logs anything").wait_for()
        open(go_on[0], "w").close()
        page.get_by_text("restarts 1 of 1: running").wait_for()
        until(lambda: page.evaluate(DATA, "lines")["xs"][2:] == [[3], [3]])
        assert page.evaluate(DATA, "deaths") == {"x": [3], "y": [pytest.approx(4 / 3)], "alpha": [0.45]}
        assert page.evaluate(DATA, "starts") == {"x": [3]}
        assert page.evaluate(DATA, "points")["x"] == [3, 3]  # a line of one point would not be seen
        page.get_by_role("button", name="Who waits?").click()
        page.get_by_text("Rank 0 waits in all_reduce (collective 2, shape [10])").wait_for()
        page.get_by_text("in train").first.wait_for()
        row_of(page, 0).get_by_text("waits").wait_for()
        row_of(page, 1).get_by_text("does not wait").wait_for()
        page.get_by_label("Metric").select_option("lr")
        until(lambda: page.evaluate(DATA, "lines")["ys"][0] == [0.1] * 3)
        page.get_by_label("Metric").select_option("seldom")
        until(lambda: page.evaluate(DATA, "lines")["ys"] == [[7]] * 2)
        assert page.evaluate(DATA, "deaths")["x"] == page.evaluate(DATA, "starts")["x"] == [3]  # as with each metric
        page.get_by_label("Against").select_option("seconds")
        until(lambda: page.evaluate(DATA, "lines")["xs"][0][0] != 1)
        assert page.evaluate(DATA, "starts")["x"][0] > page.evaluate(DATA, "deaths")["x"][0]
        open(go_on[1], "w").close()
        page.get_by_text(re.compile("Since this answer, ranks? 0.* gone on")).wait_for()
        page.get_by_text("Rank 0 waits in").wait_for()  # it can be read also where a rank only lags
        row_of(page, 1).get_by_text("running").wait_for()
        open(go_on[2], "w").close()
        job.result()
        page.get_by_text("restarts 1 of 1: finished").wait_for()
        page.get_by_text("finished; before: WorkerDied: Rank 1 died").wait_for()
        page.get_by_text(OVER).wait_for()  # and who lagged can still be read
    assert len(job.failures) == 1


def test_a_rank_that_is_stopped_does_not_answer_until_it_goes_on(client, browser, tmp_path):
    written, go_on = tmp_path / "process", tmp_path / "go-on"

    def train():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            written.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # which stops this thread a moment later
            while not go_on.exists():
                time.sleep(0.05)
        dist.barrier()
        daskrun.log_metrics(loss=1.0)

    with opened(browser, address(client)) as page, daskrun.launch(client, train) as job:
        page.get_by_text("no row for").first.wait_for()
        until(lambda: written.exists() and written.read_text())
        page.get_by_role("button", name="Who waits?").click()
        page.get_by_text("Rank 1 is stopped: process").wait_for()
        row_of(page, 0).get_by_text("waits").wait_for()
        row_of(page, 1).get_by_text("does not answer").wait_for()
        go_on.touch()
        os.kill(int(written.read_text()), signal.SIGCONT)
        job.result()
        page.get_by_text(OVER).wait_for()


def test_the_chart_shows_the_loss_once_there_is_one_and_then_what_the_viewer_chooses(client, browser, tmp_path):
    go_on = str(tmp_path / "go-on")

    def train():
        daskrun.log_metrics(called=1.0)
        while not os.path.exists(go_on):
            time.sleep(0.05)
        for step, loss in ((1, 2e-4), (2, float("nan")), (3, 2e-4), (3, 2e-4)):  # no line joins them
            daskrun.log_metrics(step=step, loss=loss)

    with opened(browser, address(client)) as page, daskrun.launch(client, train, backend=None) as job:
        page.get_by_role("columnheader", name="called").wait_for()
        assert page.get_by_label("Against").inner_text().split() == ["row", "seconds"]  # no step is logged so far
        open(go_on, "w").close()
        page.get_by_role("columnheader", name="loss").wait_for()
        page.get_by_role("columnheader", name="step").wait_for()
        job.result()
        until(lambda: page.evaluate(DATA, "points")["y"] == [2e-4] * 6)
        assert page.evaluate(DATA, "lost") == {"x": [2, 2], "y": [2e-4] * 2, "colour": [*COLOURS[:2]]}
        assert page.evaluate(SPAN) < 1e-3, "a small number would stand at the mark of 0"
        page.mouse.move(700, 600)
        page.mouse.down()
        page.mouse.move(300, 600)  # the chart is moved away
        page.mouse.up()
        until(lambda: page.evaluate(FIRST_X) > 1)
        page.get_by_label("Metric").select_option("called")
        page.get_by_role("columnheader", name="called").wait_for()
        until(lambda: page.evaluate(FIRST_X) < 1)
        page.get_by_text("finished").first.wait_for()
        assert page.get_by_role("columnheader", name="called").count() == 1


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
            if path == dashboard.PANE:  # which has no room beside its axes
                page.get_by_text("; <b>bold metric</b> against row").wait_for()
            assert not page.locator("b", has_text="bold").filter(has_not_text="<b>").count()
            assert not page.locator("img[src=x]").count()
            if path == dashboard.PAGE:
                page.get_by_role("cell", name="ValueError: <b>bold</b> <img src=x onerror=alert(1)>").wait_for()


def make_up(n_ranks, dask_scheduler=None):
    """Tell the record of a job with many ranks, of which one is dead and one lags."""
    record, name, then = record_of(dask_scheduler), f"made-up-{n_ranks}", time.monotonic() - 2000
    record.wants(Request(name, "nobody", attempts=3), then)
    workers = [
        Worker(f"tcp://10.0.0.{rank}:1", f"{rank}", f"{rank}", f"10.0.0.{rank}", str(rank)) for rank in range(n_ranks)
    ]
    record.begins(name, workers)
    for rank in range(n_ranks):
        record.hear("began", name, [0, rank, ""], then)
        for step in range(5 if rank == 3 else 20):
            row = {"rank": rank, "attempt": 0, "step": step, "loss": 1 / (step + 1) + rank / 50}
            record.hear("row", name, [row], then + 100 * step)  # a slow browser changes little
    record.hear("gone", name, ["5"], then + 2000)


@pytest.fixture
def many(client):
    client.run_on_scheduler(make_up, 64)
    yield
    client.run_on_scheduler(lambda dask_scheduler: record_of(dask_scheduler).ends("made-up-64", ""))


@pytest.mark.weekly
def test_64_ranks_are_readable_on_a_laptop_and_on_a_phone(client, browser, many):
    for viewport in (LAPTOP, PHONE):
        with opened(browser, address(client), viewport) as page:
            row_of(page, 63).wait_for()
            expect(row_of(page, 5).get_by_text("dead")).to_have_css("color", "rgb(176, 0, 32)")
            bars = [row_of(page, rank).locator(".bar").get_attribute("style") for rank in (2, 3)]
            assert "100%" in bars[0] and "21%" in bars[1]
            expect(row_of(page, 3).locator(".late")).to_have_count(1)
            expect(row_of(page, 2).locator(".late")).to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            lines = page.evaluate(DATA, "lines")
            looks = set(zip(lines["colour"], lines["dash"], strict=True))
            assert len(lines["xs"]) == 64 and len(looks) == 28  # of seven colours and four dashes


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
        page, jobs = Ranks(dask_scheduler), record_of(dask_scheduler).jobs
        page._update(time.monotonic())
        page._job.value = "made-up-3"
        page._update(time.monotonic())
        chosen = page._ranks.text.count("<tr>")
        jobs.pop("made-up-3")
        page.ask()
        page._update(time.monotonic())
        return chosen, page._ranks.text.count("<tr>"), page._job.value, page._answer.about[0]

    for n_ranks in (3, 4):
        client.run_on_scheduler(make_up, n_ranks)
    assert client.run_on_scheduler(shown) == (4, 5, "the newest", "made-up-4")  # rows: a head, and a row for each rank


def test_an_answer_grows_old_with_what_its_job_and_its_ranks_do_and_not_after_the_end(client):
    def said(dask_scheduler):
        page, record = Ranks(dask_scheduler), record_of(dask_scheduler)
        job, answers = record.jobs["made-up-2"], []

        def show():
            page._update(time.monotonic())
            answers.append(page._said.text)

        page._answer = Answer.now("Who waits.", "made-up-2", job)
        show()
        record.returns("made-up-2", 0, 1)
        show()
        record.ends("made-up-2", "WorkerDied", again=True)
        show()
        record.ends("made-up-2", "")
        show()
        page._answer = Answer.now("Who waits.", "made-up-2", job)
        show()
        return [text.removesuffix("Who waits.").strip() for text in answers]

    client.run_on_scheduler(make_up, 2)
    others = "Since this answer, the state of rank 1 has changed."
    assert client.run_on_scheduler(said) == ["", others, CHANGED, OVER, ""]


@pytest.mark.parametrize("again", [False, True])
def test_an_answer_that_comes_after_the_end_of_its_attempt_says_so(client, monkeypatch, again):
    async def looks_until_the_end(*_):
        record = record_of(client.cluster.scheduler)
        workers = [rank.worker for rank in record.jobs["made-up-2"].ranks]
        record.ends("made-up-2", "", again)
        if again:
            record.wants(Request("made-up-2", "nobody", attempt=1, attempts=3), time.monotonic())
            record.begins("made-up-2", workers[:1])
        return [Look(0, place="line 1 of train.py")], [1]

    async def said(dask_scheduler):
        page = Ranks(dask_scheduler)
        page._update(time.monotonic())
        page.ask()
        await page._asking
        page._update(time.monotonic())
        return page._said.text

    monkeypatch.setattr("daskrun.page.looks", looks_until_the_end)
    client.run_on_scheduler(make_up, 2)
    text = client.run_on_scheduler(said)
    about = "rank 0 is at line 1 of train.py. Rank 1 has returned, or raised an error."
    assert text.endswith(AGAIN) if again else text.startswith(OVER) and about in text


def test_a_pane_says_that_another_job_runs_or_is_silent(client):
    def title(dask_scheduler):
        page = Ranks(dask_scheduler)
        page.pane  # noqa: B018
        page._update(time.monotonic())
        before = page._title.text
        page._update(time.monotonic() + 300)
        return before, page._title.text

    client.run_on_scheduler(make_up, 2)
    client.run_on_scheduler(make_up, 3)
    before, after = client.run_on_scheduler(title)
    assert "1 other job runs" in before and "1 other job is silent" in after


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
            ["rank", "state", "row", "ago", "CPU", "memory", "worker"]
        )


def test_the_panes_link_asks_who_waits(client, browser, tmp_path):
    go_on = str(tmp_path / "go-on")

    def wait():
        while not os.path.exists(go_on):
            time.sleep(0.05)

    with opened(browser, address(client, dashboard.PANE), PANE) as pane, daskrun.launch(client, wait, backend=None):
        link = pane.get_by_role("link", name="Who waits?").get_attribute("href")
        with opened(browser, address(client, f"/{link}")) as page:
            page.get_by_text("in wait").first.wait_for()
            page.get_by_role("cell", name="no row for ").first.wait_for()
        open(go_on, "w").close()


def test_each_scheduler_of_a_process_has_it_in_its_menu(client):
    for _ in range(2):
        with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
            with Client(cluster) as another:
                another.run_on_scheduler(dashboard.show)
                another.run_on_scheduler(dashboard.show)
            with urlopen(f"{cluster.dashboard_link}") as answer:
                assert answer.read().decode().count('<a href="ranks">') == 1


def test_when_the_command_ends_an_open_page_has_shown_how(browser, tmp_path):
    """The command's scheduler ends with it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, daskrun\n"
        "if os.environ['RANK'] == '0':  # as most scripts, it logs on rank 0 alone\n"
        "    daskrun.log_metrics(step=1234567, epoch=1)\n"
        "time.sleep(999)\n"
    )
    command = [sys.executable, "-m", "daskrun", "--standalone", "-n", "2", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = next(line for line in process.stderr if dashboard.PAGE in line).split()[-1]
            page = browser.new_page(viewport=LAPTOP)  # its console will tell of the lost connection
            page.goto(url)
            row_of(page, 0).get_by_text("1234567", exact=True).wait_for()
            row_of(page, 1).get_by_text("running").wait_for()
            expect(row_of(page, 1)).not_to_contain_text(" s")  # since its last row: it has none
            process.send_signal(signal.SIGINT)
            page.get_by_text(LOST).wait_for()
            page.get_by_role("cell", name="stopped by SIGINT: ").wait_for()
            for rank in range(2):
                row_of(page, rank).get_by_text("stopped").wait_for()
            expect(page.get_by_role("button", name="Who waits?")).to_be_disabled()
            expect(page.get_by_label("Job")).to_be_disabled()
            page.close()
        finally:
            process.terminate()


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
                        client.run_on_scheduler(lambda dask_scheduler: record_of(dask_scheduler).jobs.clear())
            page = browser.new_page()
            page.goto(url + dashboard.PAGE)
            page.get_by_text("No job yet").wait_for()
            expect(page.get_by_text(LOST)).to_be_hidden()
            process.kill()
            page.get_by_text(LOST).wait_for()
            page.close()
        finally:
            process.terminate()
