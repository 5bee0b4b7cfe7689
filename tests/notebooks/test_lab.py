"""`workshop lab` in a real browser: notebook 01 opens with three dashboards, which light up when its cluster starts."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import TimeoutError, sync_playwright

from workshop_utils.cluster import DASHBOARD_PORT, LOOPBACK, port_is_free
from workshop_utils.tool import lab

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WORKSHOP = Path(sys.executable).parent / "workshop"
PROJECT = Path(__file__).parents[2]
DASHBOARDS = ("Task Stream", "Progress", "Workers Memory")


def stored(name):
    return json.loads(Path(lab.__file__).with_name(name).read_text(encoding="utf-8"))


@contextmanager
def running_lab(folder, *args):
    """Start `workshop lab` in a clean home; yield the address that it prints."""
    env = {**os.environ, "HOME": str(folder), "WORKSHOP_CACHE": str(folder / "cache")}
    command = [WORKSHOP, "lab", "--no-browser", *args]
    log = folder / "lab.log"
    with log.open("w") as target, subprocess.Popen(command, cwd=PROJECT, env=env, stderr=target, text=True) as running:
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text())):
                assert running.poll() is None, log.read_text()
                time.sleep(0.2)
            host, port = urlsplit(found.group()).netloc.split(":")
            while socket.socket().connect_ex((host, int(port))):  # the address is printed before anyone listens
                time.sleep(0.2)
            yield found.group()
        finally:
            running.send_signal(signal.SIGTERM)


def run_cell(page, cell):
    """Run a cell with the keyboard, again if a panel that was just opened took the focus, and wait for its end."""
    prompt = cell.locator(".jp-InputPrompt")
    for _ in range(10):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        try:
            prompt.filter(has_text=re.compile(r"\[(\*|\d+)\]")).wait_for(timeout=5_000)
            break
        except TimeoutError:
            continue
    prompt.filter(has_text=re.compile(r"\[\d+\]")).wait_for()


@pytest.fixture
def page():
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(90_000)
        yield page
        browser.close()


def test_the_dashboards_light_up_when_the_notebook_starts_its_cluster(page, tmp_path):
    if not port_is_free(DASHBOARD_PORT):
        pytest.skip(f"port {DASHBOARD_PORT} belongs to another cluster, so the notebook's is elsewhere")
    with running_lab(tmp_path, "--port", "8931") as url:
        assert url.startswith("http://127.0.0.1:8931/lab/workspaces/workshop?token=")
        page.goto(url.split("?")[0])
        assert "/login?" in page.url  # no token, no entry
        page.goto(url)
        tabs = page.locator("#jp-main-dock-panel .lm-TabBar-tabLabel")
        for title in ("01-getting-started.ipynb", *DASHBOARDS):
            tabs.filter(has_text=title).wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        start = page.locator(".jp-CodeCell", has_text="client = start_cluster").first
        for cell in (page.locator(".jp-CodeCell").first, start):
            run_cell(page, cell)
        said = start.locator(".jp-OutputArea").inner_text()
        assert "busy" not in said, said
        for title in DASHBOARDS:
            route = "individual-" + title.lower().replace(" ", "-")
            panel = page.frame_locator(f"iframe[src='http://127.0.0.1:8787/{route}']")
            panel.locator(".bk-Figure, .bk-Row, .bk-Column, canvas").first.wait_for(state="attached")
    assert not (tmp_path / ".jupyter" / "lab" / "user-settings").exists()


def test_the_layout_names_only_widgets_that_it_describes():
    data = stored("workspace.json")["data"]
    main = data["layout-restorer:data"]["main"]
    notebook, dashboards = main["dock"]["children"]
    shown = notebook["widgets"] + [widget for area in dashboards["children"] for widget in area["widgets"]]
    assert main["current"] == shown[0] == f"notebook:{lab.FIRST}" and data[shown[0]]["data"]["path"] == lab.FIRST
    assert tuple(data[widget]["data"]["item"]["label"] for widget in shown[1:]) == DASHBOARDS
    assert set(shown) == set(data) - {"layout-restorer:data"}


def test_the_dashboards_are_sought_where_a_cluster_puts_them():
    address = stored("overrides.json")["dask-labextension:plugin"]["defaultURL"]
    assert address == f"http://{LOOPBACK}:{DASHBOARD_PORT}"
