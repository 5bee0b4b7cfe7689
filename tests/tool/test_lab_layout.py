"""What `workshop lab` chooses before JupyterLab starts: what lies where, and the port of the dashboards."""

import os
import subprocess
import sys
from pathlib import Path

import dask
import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from workshop_utils.cluster import LOOPBACK, port_is_free
from workshop_utils.tool import lab
from workshop_utils.tool.lab import dashboard_port, workspace

PROJECT = Path(__file__).parents[2]
THREE = ["Task Stream", "Progress", "Workers Memory"]


def widgets(area):
    return area.get("widgets", []) + [widget for child in area.get("children", []) for widget in widgets(child)]


@pytest.mark.parametrize(("gpus", "panes"), [(0, THREE), (1, [*THREE, "GPU Utilization", "GPU Memory"])])
def test_the_layout_has_panes_for_gpus_where_there_are_some(gpus, panes):
    data = workspace(gpus)["data"]
    notebook, *shown = widgets(data["layout-restorer:data"]["main"]["dock"])
    assert data[notebook]["data"]["path"] == lab.FIRST
    assert [data[widget]["data"]["item"]["label"] for widget in shown] == panes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be kept for a server that is to come")
def test_two_labs_have_two_dashboard_ports_on_each_of_which_a_cluster_can_listen():
    with dashboard_port() as first, dashboard_port() as second:
        assert first != second
        for port in (first, second):
            assert port_is_free(port)  # which start_cluster asks
            server = HTTPServer(lambda request: None)  # as Dask's
            server.add_sockets(bind_sockets(port, LOOPBACK))
            assert not port_is_free(port)
            server.stop()


def test_the_users_own_dashboard_port_wins_and_0_is_any():
    with dask.config.set({"workshop.dashboard-port": 9999}), dashboard_port() as port:
        assert port == 9999
    with dask.config.set({"workshop.dashboard-port": 0}), dashboard_port() as port:
        assert port and port_is_free(port)


@pytest.mark.weekly
def test_a_user_whose_home_cannot_be_written_gets_a_lab_that_says_so():
    settings = {"HOME": "/proc/none", "XDG_DATA_HOME": "", "XDG_CACHE_HOME": ""}  # also root cannot write there
    command = [Path(sys.executable).parent / "workshop", "lab", "--no-browser", "--ServerApp.port_retries=50"]
    with subprocess.Popen(
        command, cwd=PROJECT, env={**os.environ, **settings}, stdout=-1, stderr=subprocess.STDOUT, text=True
    ) as running:
        said = ""
        for line in running.stdout:
            said += line
            if "token=" in line:
                running.terminate()
    assert "home folder cannot be written" in said and "token=" in said and "Traceback" not in said
