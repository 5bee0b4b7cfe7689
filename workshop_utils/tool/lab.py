"""Open JupyterLab with a notebook and its contents on the left, and Dask's dashboards on the right.

`workspace.json` says what lies where; `overrides.json` has what a user would set under Settings: where the dashboards
are, and no question about news over the lesson. Dashboards and TensorBoard come through JupyterLab's own server, so
that behind a hub or ssh nothing else has to be forwarded.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import dask

from workshop_utils.cluster import DASHBOARD_PORT, LOOPBACK, n_gpus

HERE = Path(__file__).parent
FIRST = "notebooks/01-getting-started.ipynb"


def open_lab(project: Path, *, port: int | None = None, browser: bool = True, extra: Sequence[str] = ()) -> None:
    """Run JupyterLab in the folder `project` until it is stopped; listens on loopback and asks for its token.

    Its layout is set anew at each start, in a folder of its own; the user's own settings are left alone.
    extra: more arguments of `jupyter lab`. Raises ClickException where `project` lacks the first notebook.
    """
    if not (project / FIRST).is_file():
        raise click.ClickException(f"There is no {FIRST} in {project}: run this in the folder of the workshop.")
    from jupyterlab.labapp import LabApp
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    with TemporaryDirectory(prefix="workshop-lab-") as home, dashboard_port() as panes:
        shutil.copy(HERE / "overrides.json", home)
        WorkspacesManager(home).save("workshop", json.dumps(workspace(n_gpus())))
        ours = [
            f"--ServerApp.root_dir={project}",
            f"--ServerApp.ip={LOOPBACK}",
            "--ServerApp.allow_root=True",  # the usual user in a container
            "--LabApp.default_url=/lab/workspaces/workshop",
            f"--LabApp.workspaces_dir={home}",
            f"--LabApp.app_settings_dir={home}",
            *([f"--ServerApp.port={port}"] if port else []),
            *([] if browser else ["--ServerApp.open_browser=False", "--LabApp.open_browser=False"]),
        ]
        server = LabApp.initialize_server([*ours, *extra])
        _show_dashboard(server.web_app, server.base_url, panes)
        os.environ["DASK_WORKSHOP__DASHBOARD_PORT"] = str(panes)  # for the kernels, as what follows
        os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{server.base_url}proxy/%PORT%/")
        server.start()


@contextmanager
def dashboard_port() -> Iterator[int]:
    """Yield the port of the dashboard: Dask's setting `workshop.dashboard-port`, else 8787, else any that is free.

    Until the block is left, no other lab of this machine gets it (on Linux), though no cluster listens there yet.
    """
    if port := dask.config.get("workshop.dashboard-port", 0):
        yield port
        return
    with socket.socket() as claim:
        try:
            claim.bind((LOOPBACK, DASHBOARD_PORT))
        except OSError:
            claim.bind((LOOPBACK, 0))
        port = claim.getsockname()[1]
        # Linux now lets a server have the port that says the same, as Dask's does, and refuses others, as the lines
        # above. Elsewhere this could keep out the cluster, too.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            claim.close()
        yield port


def workspace(gpus: int) -> dict:
    """Return what lies where in JupyterLab, with panes for GPUs if there are any; `gpus`: how many."""
    content = json.loads((HERE / "workspace.json").read_text(encoding="utf-8"))
    if not gpus:
        panes = content["data"]["layout-restorer:data"]["main"]["dock"]["children"][1]
        for part in (panes["children"], panes["sizes"]):
            part.pop()
        content["data"] = {name: about for name, about in content["data"].items() if "gpu" not in name}
    return content


def _show_dashboard(web_app, base_url, dashboard_port):
    from jupyter_server.utils import url_path_join
    from jupyter_server_proxy.handlers import NamedLocalProxyHandler
    from tornado.httpclient import AsyncHTTPClient

    class Dashboard(NamedLocalProxyHandler):
        port = dashboard_port
        shown = None  # the scheduler that the panes show

        async def http_get(self, path):
            if path == "/individual-plots.json":  # which JupyterLab asks for every four seconds
                self.finish(await self.plots())
            else:
                await super().http_get(path)

        async def plots(self):
            # None where there is no cluster, and once where there is another: so the panes drop what they show and load
            # the next. After an error JupyterLab would ask less and less often, in the end every two minutes.
            before, Dashboard.shown = Dashboard.shown, None
            with suppress(Exception):  # nobody answers, not in time, or something else than Dask
                # json/identity.json says it, too, but in Dask 2026.7 fails with a traceback just after tasks.
                Dashboard.shown = re.search(rb"Scheduler (\w+://\S+)", await fetch("info/main/workers.html"))[1]
                if before in (None, Dashboard.shown):
                    return json.loads(await fetch("individual-plots.json"))
            return {}

    async def fetch(path):
        url = f"http://{LOOPBACK}:{dashboard_port}/{path}"
        return (await AsyncHTTPClient().fetch(url, request_timeout=5)).body

    web_app.add_handlers(".*$", [(url_path_join(base_url, "workshop/dashboard(.*)"), Dashboard)])
