"""`workshop lab` in a real browser, on a machine where another cluster has 8787, below a base URL as behind a proxy.

An attendee finds notebook, contents and dashboards; goes through notebook 01, with a mistake; restarts the kernel.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from distributed import LocalCluster
from lessons import code_cells, read
from playwright.sync_api import Error, expect

from daskrun.settings import n_gpus
from workshop_utils.cluster import DASHBOARD_PORT
from workshop_utils.object_store import LOOPBACK
from workshop_utils.progress import FINISHED
from workshop_utils.tool import lab

WORKSHOP = Path(sys.executable).parent / "workshop"
PROJECT = Path(__file__).parents[2]
BASE = "/user/anna/"
DASHBOARDS = ("Task Stream", "Ranks", "Workers Memory") + ("GPU Utilization", "GPU Memory") * bool(n_gpus())
TABS = "#jp-main-dock-panel .lm-TabBar-tabLabel"
# The task stream shows what ends after it was opened, and the pane follows to a new cluster in its own time.
WORKS_ON = """\
import threading, time
from contextlib import suppress
from workshop_utils.cluster import start_cluster
client = start_cluster(1)
def first(x): return x
def work(client=client):
    with suppress(Exception):
        while client.status == "running":
            client.gather(client.map(first, range(9), pure=False))
            time.sleep(0.5)
threading.Thread(target=work, daemon=True).start()"""
TENSORBOARD = """\
import os, sys
os.environ["TENSORBOARD_BINARY"] = os.path.join(os.path.dirname(sys.executable), "tensorboard")
%load_ext tensorboard
%tensorboard --logdir . --port 0"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A home and in it a copy of the workshop, which JupyterLab may write into."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(PROJECT / "notebooks", folder / "workshop" / "notebooks")
    shutil.copytree(PROJECT / "img", folder / "workshop" / "img")
    return folder


@pytest.fixture(scope="module")
def others():
    """Somebody else's cluster, with the port where one would look for ours."""
    settings = {"n_workers": 0, "processes": False, "dashboard_address": f"{LOOPBACK}:{DASHBOARD_PORT}"}
    with warnings.catch_warnings(action="ignore"), LocalCluster(**settings):  # others of this machine may have the port
        yield


@pytest.fixture(scope="module")
def url(folder, others):
    """The address that `workshop lab` prints."""
    env = {**os.environ, "HOME": str(folder), "WORKSHOP_CACHE": str(folder / "cache"), "DASK_SCHEDULER_ADDRESS": ""}
    command = [WORKSHOP, "lab", "--no-browser", f"--ServerApp.base_url={BASE}"]
    log = folder / "lab.log"
    with (
        log.open("w") as target,
        subprocess.Popen(command, cwd=folder / "workshop", env=env, stderr=target, text=True) as running,
    ):
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text())):
                assert running.poll() is None, log.read_text()
                time.sleep(0.2)
            yield found.group()
        finally:
            running.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def page(browser, url):
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(60_000)
    expect.set_options(timeout=180_000)  # a cell runs that long where other programs share the cores
    page.goto(url)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    expect(page.locator(TABS)).to_have_count(1 + len(DASHBOARDS))
    return page


def cell_with(page, text):
    return page.locator(".jp-CodeCell", has_text=text).first


def run(page, cell, code=None):
    """Run a cell from the keyboard, with other code if given; return what it says."""
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.inner_text()
    while prompt.inner_text() == before:  # a panel that was just opened may have taken the focus
        cell.locator(".cm-content").click()
        if code:
            page.keyboard.press("Control+a")
            page.keyboard.insert_text(code)
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(500)
    expect(prompt).to_have_text(re.compile(r"\[\d+\]"))
    return cell.locator(".jp-Cell-outputArea").inner_text()


def run_from(page, cell, n_cells):
    """Run a cell and those after it, `n_cells` in all, as an attendee does, with Shift and Enter."""
    cell.locator(".cm-content").click()
    for _ in range(n_cells):
        page.keyboard.press("Shift+Enter")


def wait_for_task(page, name, dashboard="task-stream"):
    """Wait until a pane draws tasks of this name, and the others draw something."""
    names = "m => [...(m.data instanceof Map ? m.data.get('name') : m.data.name) ?? []]"
    there = f"name => Bokeh.documents.some(d => [...d.all_models].some(m => m.data && ({names})(m).includes(name)))"
    while True:  # until the test's own limit
        frame = page.frame(url=re.compile(f"{BASE}workshop/dashboard/individual-{dashboard}"))
        with suppress(Error):  # it is just loading
            if frame and frame.evaluate(there, name):
                break
        page.wait_for_timeout(200)
    for title in DASHBOARDS:
        route = "individual-" + title.lower().replace(" ", "-")
        page.frame_locator(f"iframe[src$='{route}']").locator(".bk-Figure, .bk-Column").first.wait_for(state="attached")


def test_nobody_enters_without_the_token(url):
    with urlopen(url.split("?")[0]) as answer:
        assert "/login?" in answer.url


def test_the_notebook_is_between_its_contents_and_the_dashboards(page):
    expect(page.locator(TABS)).to_have_text(["01-getting-started.ipynb", *DASHBOARDS])
    expect(page.locator(".jp-TableOfContents-tree").get_by_text("Exercise 2")).to_be_visible()
    width = {name: page.locator(name).bounding_box()["width"] for name in ("#jp-left-stack", ".jp-NotebookPanel")}
    assert 180 < width["#jp-left-stack"] < 280 and width[".jp-NotebookPanel"] > 780, width


def test_eighty_columns_fit_beside_the_dashboards_and_no_picture_of_jupyterlab_is_shown(page):
    page.set_viewport_size({"width": 1400, "height": 900})
    code = page.locator(".jp-CodeCell .cm-content").first
    needed, there = code.evaluate("""code => {
        const pen = document.createElement('canvas').getContext('2d');
        pen.font = getComputedStyle(code).font;
        const line = getComputedStyle(code.querySelector('.cm-line'));
        const padding = parseFloat(line.paddingLeft) + parseFloat(line.paddingRight);
        return [pen.measureText('x'.repeat(80)).width + padding, code.closest('.cm-scroller').clientWidth];
    }""")
    page.set_viewport_size({"width": 1600, "height": 1000})
    assert needed <= there
    picture = page.locator(".jp-Notebook img[src*='lab.png']").first
    assert picture.evaluate("picture => getComputedStyle(picture).display") == "none"


def test_a_cell_says_above_it_what_it_is(page, folder):
    first = next(
        cell for cell in code_cells(read(folder / "workshop" / lab.FIRST)) if "guess" in cell.metadata.get("tags", ())
    )
    guess = cell_with(page, first.source.splitlines()[0])
    expect(guess).to_have_attribute("data-workshop", "guess")
    assert guess.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Your guess"'
    expect(cell_with(page, "n_workers = None")).not_to_have_attribute("data-workshop", re.compile("."))


@pytest.mark.weekly
def test_an_attendee_goes_through_notebook_01_with_a_mistake_and_restarts_the_kernel(page, folder):
    path = folder / "workshop" / lab.FIRST
    sources = [cell.source for cell in read(path).cells]
    stub = sources.index("def total_bones(client):\n    return None  # your code here")
    run(page, cell_with(page, "n_workers = None"))
    run_from(page, cell_with(page, "client = start_cluster"), stub - 3)
    answer, check = cell_with(page, "def total_bones"), cell_with(page, "check_total_bones")
    run(page, answer, "def total_bones(client):\n    return client.run(os.getenv, 'BONES')")
    said = run(page, check)
    assert said.startswith("Not yet: that's one answer per worker") and "Traceback" not in said
    expect(check).to_have_attribute("data-verdict", "Not yet")
    run(page, answer, "def total_bones(client):\n    return sum(map(int, client.run(os.getenv, 'BONES').values()))")
    assert run(page, check).startswith("Correct.")
    assert check.locator(".jp-OutputArea-output pre").evaluate("pre => getComputedStyle(pre).wordBreak") == "normal"
    red, green, blue = check.locator(".jp-OutputArea-output pre").evaluate(
        "pre => getComputedStyle(pre).color.match(/\\d+/g)"
    )
    assert int(green) > max(int(red), int(blue))
    run_from(page, check, len(sources) - stub - 3)
    last = cell_with(page, "check_darkest").locator(".jp-InputPrompt")
    expect(last).to_have_text(re.compile(r"\[\d+\]"))
    wait_for_task(page, "brightness", "task-stream")
    run(page, cell_with(page, "client.shutdown()"))
    page.keyboard.press("Control+s")
    expect(page.locator(".lm-TabBar-tab.jp-mod-dirty")).to_have_count(0)
    for cell in code_cells(read(path)):
        assert cell.execution_count or "def our_total_bones" in cell.source  # our solution was not needed
        assert "traceback" not in str(cell.outputs).lower(), cell.outputs
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.locator("[data-command='kernelmenu:restart']").click()
    with page.expect_response(re.compile("/restart")):
        page.locator(".jp-Dialog-button.jp-mod-accept").click()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()


def test_a_cell_runs_and_the_dashboards_follow(page):
    page.locator(".jp-TableOfContents-tree").get_by_text("Who are your workers?").click()
    said = run(page, cell_with(page, "client = start_cluster"), WORKS_ON)
    wait_for_task(page, "first")
    assert FINISHED.sub("", said).strip() == "", "neither a busy port nor an earlier cluster"
    code = "n_workers = None\nimport inspect\nprint(inspect.getsource(first))"
    said = run(page, cell_with(page, "n_workers = None"), code)
    assert "def first(x): return x" in said, "what the panes ask has emptied Python's cache of source lines"


def test_a_guess_that_is_no_number_is_answered_as_by_a_check(page):
    cell = cell_with(page, "n_workers = None")
    code = 'n_workers = None\nfrom workshop_utils.exercises import reconcile\nreconcile("two", 1.0, 2.0, "s")'
    run(page, cell, code)
    expect(cell).to_have_attribute("data-verdict", "Not yet")
    told = cell.locator(".jp-RenderedText", has_text="Not yet: your guess")
    red, green, blue = told.evaluate("e => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number)")[:3]
    assert red > green > blue, "amber; JupyterLab's own is pink"


def test_a_failed_cell_leaves_no_mark_in_the_contents(page):
    run(page, cell_with(page, "n_workers = None"), "n_workers = None\n1 / 0")
    marked = page.locator(".jp-tocItem-content[data-running='-0.5']")
    expect(marked).to_have_count(1)  # where JupyterLab draws its mark
    assert marked.evaluate("item => getComputedStyle(item, '::after').content") == "none"


def test_a_long_heading_in_the_contents_wraps(page):
    item = page.locator(".jp-TableOfContents-tree .jp-tocItem-content").first
    text = item.inner_text()
    item.evaluate("(item, text) => { item.textContent = text; }", 5 * text)
    is_whole = """item => {
        const [text, row] = [item, item.closest("jp-tree-item").shadowRoot.firstElementChild];
        return text.scrollWidth <= text.clientWidth && text.scrollHeight <= row.clientHeight;
    }"""
    assert item.evaluate(is_whole)
    item.evaluate("(item, text) => { item.textContent = text; }", text)


def test_the_dashboards_are_dark_with_jupyterlab(page):
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    dark = page.locator("iframe[src*='individual-ranks']").evaluate("frame => getComputedStyle(frame).filter")
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert "invert" in dark


@pytest.mark.weekly
def test_tensorboard_comes_through_the_proxy(page):
    run(page, page.locator(".jp-CodeCell").first, TENSORBOARD)
    board = page.frame_locator(f"iframe[src*='{BASE}proxy/']")
    expect(board.get_by_text("No dashboards are active")).to_be_visible()
