"""What `workshop lab` chooses before JupyterLab starts, what it prints, and how it ends."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.cookiejar import CookieJar
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import psutil
import pytest
from click.testing import CliRunner
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.web import Application
from tornado.websocket import WebSocketClosedError, websocket_connect
from traitlets.config import Config
from waiting import until

from workshop_utils.object_store import LOOPBACK
from workshop_utils.tool import lab
from workshop_utils.tool.cli import main
from workshop_utils.tool.lab import workspace

PROJECT = Path(__file__).parents[2]
THREE = ["Task Stream", "Ranks", "Workers Memory"]


def widgets(area):
    return area.get("widgets", []) + [widget for child in area.get("children", []) for widget in widgets(child)]


@pytest.mark.parametrize(("gpus", "panes"), [(0, THREE), (1, [*THREE, "GPU Utilization", "GPU Memory"])])
def test_the_layout_has_panes_for_gpus_where_there_are_some(gpus, panes):
    data = workspace(gpus)["data"]
    notebook, *shown = widgets(data["layout-restorer:data"]["main"]["dock"])
    assert data[notebook]["data"]["path"] == lab.FIRST
    assert [data[widget]["data"]["item"]["label"] for widget in shown] == panes


@contextmanager
def running_lab(folder, *options, **settings):
    """Run `workshop lab` with its log in the new folder; yield its process, its address and its token."""
    command = [Path(sys.executable).parent / "workshop", "lab", "--no-browser", "--ServerApp.port_retries=50", *options]
    log = folder / "log"
    with (
        log.open("w") as target,
        subprocess.Popen(command, cwd=PROJECT, env=os.environ | settings, stdout=target, stderr=target) as running,
    ):
        try:
            last_line = re.compile(r"(http\S+)\?token=(\w+)\n\Z")
            found = until(lambda: running.poll() is not None or last_line.search(log.read_text()), log.read_text)
            assert found is not True, log.read_text()
            yield running, *found.groups()
        finally:
            running.terminate()


def post(address, path, token):
    url = urlsplit(address)._replace(path=f"/api/kernels{path}").geturl()
    with urlopen(Request(url, data=b"{}", headers={"Authorization": f"token {token}"})) as answer:
        return json.load(answer)


@pytest.mark.weekly
@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])  # also root cannot write there
def test_a_user_whose_home_cannot_be_written_gets_a_lab_that_says_so(home, tmp_path):
    settings = {"HOME": home, "XDG_DATA_HOME": "", "XDG_CACHE_HOME": ""}
    with running_lab(tmp_path, **settings):
        said = (tmp_path / "log").read_text()
    assert "home folder cannot be written" in said and "Traceback" not in said


class _Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.headers)
        self.send_response(204)
        self.end_headers()


async def first_message(url, headers):
    return await (await websocket_connect(HTTPRequest(url, headers=headers))).read_message()


def test_a_dashboard_does_not_learn_the_token_and_one_that_is_gone_leaves_no_traceback(tmp_path):
    with running_lab(tmp_path, TMPDIR=str(tmp_path)) as (_, address, token):
        (home,) = tmp_path.glob("workshop-lab-*")
        page = Request(urlsplit(address)._replace(path="/workshop/dashboard/status").geturl())
        with HTTPServer((LOOPBACK, 0), _Dashboard) as dashboard:
            dashboard.asked = []
            (home / "dashboard.json").write_text(json.dumps([*dashboard.server_address, "Scheduler-1"]))
            with urlopen(page) as answer:
                assert "/login?" in answer.url and not dashboard.asked
            page.add_header("Authorization", f"token {token}")
            page.add_header("Cookie", "login=secret")
            with ThreadPoolExecutor() as elsewhere:
                elsewhere.submit(dashboard.handle_request)
                urlopen(page).close()
        assert token not in str(dashboard.asked[0]) and "secret" not in str(dashboard.asked[0])
        with pytest.raises(HTTPError, match="503"):
            urlopen(page)
        assert asyncio.run(first_message(page.full_url.replace("http", "ws", 1), page.headers)) is None
        assert "Traceback" not in (tmp_path / "log").read_text()


async def connected(url, headers):
    (await websocket_connect(HTTPRequest(url, headers=headers))).close()


@pytest.mark.weekly
def test_in_codespaces_its_own_page_is_let_in_and_no_other(tmp_path):
    with running_lab(tmp_path, CODESPACE_NAME="ours") as (_, address, token):
        browser = build_opener(HTTPCookieProcessor(jar := CookieJar()))
        browser.open(f"{address}?token={token}").close()
        events = urlsplit(address)._replace(scheme="ws", path="/api/events/subscribe").geturl()
        cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
        asyncio.run(connected(events, {"Cookie": cookies, "Origin": "https://ours-8888.app.github.dev"}))
        for other in ("https://theirs-8888.app.github.dev", "https://ours-8888.app.github.dev.example.com"):
            with pytest.raises(HTTPClientError, match="403"):
                asyncio.run(connected(events, {"Cookie": cookies, "Origin": other}))


def is_told_to_end(process):
    """Whether SIGTERM waits for a stopped process."""
    pending = re.findall(r"(?:Sig|Shd)Pnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return any(int(signals, 16) & 1 << signal.SIGTERM - 1 for signals in pending)


def kernels_process(running, kernel):
    """Return the process of a kernel of this lab, or None."""
    children = psutil.Process(running.pid).children()
    return next((one for one in children if kernel in " ".join(one.cmdline())), None)


def test_an_option_that_jupyter_lacks_is_refused():
    done = CliRunner().invoke(main, ["lab", "--prot", "9"])
    assert done.exit_code == 2 and re.search("No such option.*--prot.*--port", done.output)


@pytest.mark.weekly
def test_an_address_that_is_another_machines_is_refused(tmp_path):
    command = [Path(sys.executable).with_name("workshop"), "lab", "--no-browser", "--ip=192.0.2.1"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and re.fullmatch("Error: JupyterLab cannot start: .*address.\n", done.stderr)
    assert not list(tmp_path.glob("workshop-lab-*"))


def test_a_lab_says_which_setting_it_does_not_know_and_that_a_port_is_busy_then_its_address_and_ends_by_sighup(
    tmp_path,
):
    with socket.create_server((LOOPBACK, 0)) as busy:
        port = busy.getsockname()[1]
        with running_lab(tmp_path, "--ServerApp.prot=9", "--port", str(port), TMPDIR=str(tmp_path)) as (
            running,
            address,
            token,
        ):
            kernel = post(address, "", token)["id"]
            until(lambda: kernels_process(running, kernel))
            connection = json.loads(Path(kernels_process(running, kernel).cmdline()[-1]).read_text())
            assert connection["curve_publickey"], "or the kernel warns, below the address, that it is not encrypted"
            running.send_signal(signal.SIGHUP)  # as of a terminal that is closed, and as SIGTERM
            running.wait()
            assert not list(tmp_path.glob("workshop-lab-*"))
    said = (tmp_path / "log").read_text()
    assert f"Port {port} is busy, so JupyterLab has {urlsplit(address).port}." in said
    assert said.count("`prot` not recognized") == 1 and "dask_labextension" not in said


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere we cannot see which signals are pending")
def test_sigterm_ends_the_lab_also_while_a_kernel_is_restarted(tmp_path):
    patient = "--KernelManager.shutdown_wait_time=60"
    with running_lab(tmp_path, patient) as (running, address, token):
        kernel = post(address, "", token)["id"]
        until(lambda: kernels_process(running, kernel))
        process = kernels_process(running, kernel)
        process.suspend()  # a restart asks it to end, after thirty seconds tells it, and after sixty kills it
        with ThreadPoolExecutor() as elsewhere:
            elsewhere.submit(post, address, f"/{kernel}/restart", token)
            until(lambda: is_told_to_end(process))
            running.terminate()
            running.wait()
        process.resume()
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_a_browser_that_is_closed_is_no_error_in_the_log():
    def record_of(error):
        return logging.LogRecord(
            "tornado.application", logging.ERROR, "", 0, "Uncaught", (), (type(error), error, None)
        )

    assert not lab._is_no_gone_browser(record_of(WebSocketClosedError()))
    assert lab._is_no_gone_browser(record_of(OSError()))
    assert lab._is_no_gone_browser(logging.makeLogRecord({"msg": "none"}))


def test_a_second_lab_of_the_same_user_changes_nothing_of_the_first(monkeypatch):
    def start():
        mine = settings[-1]
        if len(settings) == 1:
            lab.open_lab(PROJECT)
        assert sorted(path.suffix for path in mine.iterdir()) == [".json", ".jupyterlab-workspace"]

    def initialize_server(arguments):
        settings.append(Path(next(one for one in arguments if "app_settings_dir" in one).split("=")[1]))
        idle = SimpleNamespace(add_callback=lambda *_, **__: None)
        server = SimpleNamespace(base_url="/user/anna/", connect_url="", web_app=Application(), io_loop=idle)
        server.kernel_manager = SimpleNamespace(config=configs[len(settings) - 1])
        server.start_app = server.cleanup_kernels = lambda: None
        server.start_ioloop = start
        return server

    settings, configs = [], [Config(), Config({"KernelManager": {"transport_encryption": "required"}})]
    for name in ("WORKSHOP_PANES", "TENSORBOARD_PROXY_URL"):
        monkeypatch.setenv(name, "")  # so that it is put back in the end
        monkeypatch.delenv(name)
    monkeypatch.setattr("jupyterlab.labapp.LabApp.initialize_server", initialize_server)
    lab.open_lab(PROJECT)
    first, second = settings
    assert first != second and not first.exists() and not second.exists()
    assert [config.KernelManager.transport_encryption for config in configs] == ["auto", "required"]  # the user's wins
    assert os.environ["TENSORBOARD_PROXY_URL"] == "/user/anna/proxy/%PORT%/"
