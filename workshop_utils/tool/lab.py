"""Open JupyterLab with a notebook and its contents on the left, and Dask's dashboards on the right.

`workspace.json` has the layout; `overrides.json` has what a user would set under Settings: the address of the
dashboards, and no question about news. `extensions` makes cells look like what their tags say they are. Dashboards and
TensorBoard come through JupyterLab's own server, so behind a hub or ssh nothing else has to be forwarded.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import dask

from daskrun.settings import n_gpus
from workshop_utils.cluster import DASHBOARD_PORT, LOOPBACK

HERE = Path(__file__).parent
FIRST = "notebooks/01-getting-started.ipynb"


def open_lab(project: Path, *, port: int | None = None, browser: bool = True, extra: Sequence[str] = ()) -> None:
    """Run JupyterLab in the folder `project` until it is stopped; it listens on loopback and asks for its token.

    Each start has its layout in a new folder and leaves the user's own settings alone.
    extra: more arguments of `jupyter lab`. Raises ClickException if `project` lacks the first notebook, and
    NoSuchOption for an argument that `jupyter lab` does not know.
    """
    if not (project / FIRST).is_file():
        raise click.ClickException(f"There is no {FIRST} in {project}: run this in the folder of the workshop.")
    with TemporaryDirectory(prefix="workshop-lab-") as home, dashboard_port() as panes:
        if not os.access(os.path.expanduser("~"), os.W_OK):  # as with `docker --user`
            click.echo("Your home folder cannot be written, so settings and sketches last until this lab is stopped.")
            os.environ["HOME"] = home
        from jupyterlab.labapp import LabApp  # which looks for a home when it is imported
        from jupyterlab_server.workspaces_handler import WorkspacesManager

        _refuse_unknown_options(extra)
        shutil.copy(HERE / "overrides.json", home)
        WorkspacesManager(home).save("workshop", json.dumps(workspace(n_gpus())))
        ours = [
            f"--ServerApp.root_dir={project}",
            f"--ServerApp.ip={LOOPBACK}",
            "--ServerApp.allow_root=True",  # in a container, the user is usually root
            "--LabApp.default_url=/lab/workspaces/workshop",
            f"--LabApp.workspaces_dir={home}",
            f"--LabApp.app_settings_dir={home}",
            "--LanguageServerManager.autodetect=False",  # it would list twenty servers that are not installed
            f"--LabApp.extra_labextensions_path={HERE / 'extensions'}",
            *([f"--ServerApp.port={port}"] if port else []),
            *([] if browser else ["--ServerApp.open_browser=False", "--LabApp.open_browser=False"]),
        ]
        server = LabApp.initialize_server([*ours, *extra])
        _show_dashboard(server.web_app, server.base_url, panes)
        os.environ["DASK_WORKSHOP__DASHBOARD_PORT"] = str(panes)  # kernels inherit this and the next
        os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{server.base_url}proxy/%PORT%/")
        server.start()


def _refuse_unknown_options(words):
    """Raise NoSuchOption for an option that JupyterLab does not know: it would only warn, and start all the same."""
    from jupyter_server.serverapp import ServerApp
    from jupyterlab.labapp import LabApp
    from traitlets.config import Configurable

    apps = [LabApp(), ServerApp()]
    known = {"port", "no-browser", "help-all", "version"}.union(*(map(str, [*app.flags, *app.aliases]) for app in apps))
    classes = {each.__name__: each for each in _subclasses(Configurable)}
    for word in words:
        name = word.lstrip("-").partition("=")[0]
        if name == word.partition("=")[0] or not name[:1].isalpha():  # a value, or a negative number
            continue
        owner, dot, setting = name.partition(".")
        if not dot:
            choices = known
        elif owner in classes:
            choices = {f"{owner}.{trait}" for trait in classes[owner].class_trait_names(config=True)}
            name = f"{owner}.{setting.partition('.')[0]}"
        elif owner.endswith(tuple(classes)):  # the class of an extension, such as S3ContentsManager
            continue
        else:  # so may this be, unless it is nearly the name of a known class
            choices = {f"{right}.{setting}" for right in get_close_matches(owner, classes, cutoff=0.85)} or {name}
        if name not in choices:
            close = [f"--{choice}" for choice in get_close_matches(name, choices)]
            raise click.NoSuchOption(f"--{name}", possibilities=close)


def _subclasses(base):
    for each in base.__subclasses__():
        yield from (each, *_subclasses(each))


@contextmanager
def dashboard_port() -> Iterator[int]:
    """Yield the port of the dashboard: Dask's setting `workshop.dashboard-port`, else 8787, else any that is free.

    On Linux, no other lab of this machine gets the port before the block is left, though no cluster listens there yet.
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
        # From now on Linux gives the port to a server that sets this option too, as Dask's does, and to no bind without
        # it, such as the one above. Elsewhere the claim could keep out the cluster, too.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            claim.close()
        yield port


def workspace(gpus: int) -> dict:
    """Return the layout of JupyterLab, with panes for GPUs if there are any; `gpus`: how many."""
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
        shown: bytes | None = None  # address of the scheduler that the panes show

        async def http_get(self, path):
            if path == "/individual-plots.json":  # JupyterLab asks for it every four seconds
                self.finish(await self.plots())
            else:
                await super().http_get(path)

        async def plots(self):
            # Answer with no plots while there is no cluster, and once when there is another: then the panes drop what
            # they show and load the next. After an error JupyterLab would ask less often, in the end every two minutes.
            before, Dashboard.shown = Dashboard.shown, None
            with suppress(Exception):  # nobody answers, or not in time, or a server that is not Dask's
                # json/identity.json has the address, too, but in Dask 2026.7 it fails with a traceback after tasks.
                found = re.search(rb"Scheduler (\w+://\S+)", await fetch("info/main/workers.html"))
                Dashboard.shown = found[1] if found else None
                if found and before in (None, found[1]):
                    return json.loads(await fetch("individual-plots.json"))
            return {}

    async def fetch(path):
        url = f"http://{LOOPBACK}:{dashboard_port}/{path}"
        return (await AsyncHTTPClient().fetch(url, request_timeout=5)).body

    web_app.add_handlers(".*$", [(url_path_join(base_url, "workshop/dashboard(.*)"), Dashboard)])
