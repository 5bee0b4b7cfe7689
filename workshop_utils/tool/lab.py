"""Open JupyterLab with a notebook and its contents on the left, and Dask's dashboards on the right.

`workspace.json` has the layout; `overrides.json` has what a user would set under Settings: the address of the
dashboards, which `panes` serves, and no question about news. `extensions` makes cells look like what their tags say
they are. Dashboards and TensorBoard come through JupyterLab's own server, so behind a hub or ssh nothing else has to be
forwarded.
"""

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from daskrun.settings import n_gpus
from workshop_utils.cluster import PANES
from workshop_utils.object_store import LOOPBACK
from workshop_utils.tool import FIRST

HERE = Path(__file__).parent


def open_lab(project: Path, *, port: int | None = None, browser: bool = True, extra: Sequence[str] = ()) -> None:
    """Run JupyterLab in the folder `project` until it is stopped; it listens on loopback and asks for its token.

    Each start has its layout in a new folder and leaves the user's own settings alone.
    extra: more arguments of `jupyter lab`, which win over ours.
    Raises ClickException if `project` lacks the first notebook, and NoSuchOption for an option that Jupyter lacks.
    """
    if not (project / FIRST).is_file():
        raise click.ClickException(f"There is no {FIRST} in {project}: run this in the folder of the workshop.")
    with TemporaryDirectory(prefix="workshop-lab-") as home:
        # With `docker --user`, a home may not be writable; system users have /dev/null, which is, but is no folder.
        if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
            click.echo("Your home folder cannot be written, so settings and sketches last until this lab is stopped.")
            os.environ["HOME"] = home
        from jupyterlab.labapp import LabApp  # which looks for a home when it is imported
        from jupyterlab_server.workspaces_handler import WorkspacesManager

        from workshop_utils.tool.panes import serve_dashboard

        _refuse_unknown(extra, [*LabApp.aliases, *LabApp.flags])
        shutil.copy(HERE / "overrides.json", home)
        WorkspacesManager(home).save("workshop", json.dumps(workspace(n_gpus())))
        ours = _our_settings(project, home, port, browser)
        # Jupyter takes no setting twice, and what the user wrote wins.
        names = [word.lstrip("-").partition("=")[0] for word in extra]
        given = {LabApp.aliases.get(name, name) for name in names}
        arguments = [f"--{name}={value}" for name, value in ours.items() if name not in given]
        logging.getLogger("ServerApp").addFilter(_about_options())
        server = _initialized(LabApp, [*arguments, *extra])
        _encrypt(server.kernel_manager.config.KernelManager)
        panes = Path(home) / "dashboard.json"
        serve_dashboard(server.web_app, server.base_url, panes)
        os.environ[PANES] = str(panes)  # kernels inherit this and the next
        os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{server.base_url}proxy/%PORT%/")
        _end_in_any_case(server)
        logging.disable()  # else Jupyter says in ten lines what we say in two, and before it listens
        server.start_app()
        logging.disable(logging.NOTSET)
        for name in ("ServerApp", "tornado"):
            logging.getLogger(name).setLevel(logging.ERROR)  # their warnings would come below the address
        for name in ("ServerApp", "tornado.application"):
            logging.getLogger(name).addFilter(_is_no_gone_browser)
        if port and "ServerApp.port" not in given and server.port != port:
            click.echo(f"Port {port} is busy, so JupyterLab has {server.port}.", err=True)
        address = f"JupyterLab runs until you press Ctrl-C twice. Its address:\n{server.connect_url}"
        server.io_loop.add_callback(click.echo, address, err=True)
        server.start_ioloop()


def _initialized(lab, words):
    try:
        return lab.initialize_server(words)
    except OSError as error:  # such as of an --ip that is another machine's
        raise click.ClickException(f"JupyterLab cannot start: {error}.") from error


def _refuse_unknown(words, of_lab):
    """Refuse an option that Jupyter would ignore, or answer with its own usage; one with a dot is a class's setting."""
    from jupyter_server.serverapp import aliases, flags

    known = {f"--{name}" for name in (*of_lab, *aliases, *flags, "help-all", "version")}
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and "." not in name and name not in known:
            raise click.NoSuchOption(name, possibilities=get_close_matches(name, known))


def _our_settings(project, home, port, browser):
    """Return what we set of JupyterLab. home: the folder of this start."""
    settings = {
        "ServerApp.root_dir": project,
        "ServerApp.ip": LOOPBACK,
        "ServerApp.allow_root": True,  # in a container, the user is usually root
        "LabApp.default_url": "/lab/workspaces/workshop",
        "LabApp.workspaces_dir": home,
        "LabApp.app_settings_dir": home,
        "Application.log_level": "WARN",  # of which `_about_options` keeps what the user should read
        "LanguageServerManager.autodetect": False,  # it would list twenty servers that are not installed
        "LabApp.extra_labextensions_path": HERE / "extensions",
    }
    if port:
        settings["ServerApp.port"] = port
    if name := os.environ.get("CODESPACE_NAME"):  # GitHub passes on what its own page asks for, and no other's
        domain = os.environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "app.github.dev")
        settings["ServerApp.allow_origin_pat"] = rf"https://{re.escape(name)}-\d+\.{re.escape(domain)}"
    if not browser:
        settings |= {"ServerApp.open_browser": False, "LabApp.open_browser": False}
    return settings


def _encrypt(settings):
    """Have kernels encrypted, if Jupyter can do it and the user has not decided: else each warns, on loopback, too."""
    import zmq
    from jupyter_client.manager import KernelManager

    if hasattr(KernelManager, "transport_encryption") and zmq.has("curve"):
        settings.setdefault("transport_encryption", "auto")


def _about_options():
    """Return a filter of the log that keeps errors and, once each, the options that Jupyter does not know."""
    said = set()

    def is_kept(record):
        text = record.getMessage()
        is_new = "recognized" in text and text not in said
        said.add(text)
        return is_new or record.levelno >= logging.ERROR

    return is_kept


def _is_no_gone_browser(record):
    """Return whether a record of the log says more than that a pane's browser was closed, which is no error."""
    from tornado.websocket import WebSocketClosedError

    return not (record.exc_info and isinstance(record.exc_info[1], WebSocketClosedError))


def _end_in_any_case(server):
    """Let the server end although a kernel cannot be shut down, as while it is restarted; it ends with the server."""
    shut_down = server.cleanup_kernels

    async def cleanup_kernels():
        with suppress(Exception):  # after an error, Jupyter Server would never leave its loop
            await shut_down()

    server.cleanup_kernels = cleanup_kernels
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal is closed
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


def workspace(gpus: int) -> dict:
    """Return the layout of JupyterLab, with panes for GPUs if there are any; `gpus`: how many."""
    content = json.loads((HERE / "workspace.json").read_text(encoding="utf-8"))
    if not gpus:
        panes = content["data"]["layout-restorer:data"]["main"]["dock"]["children"][1]
        for part in (panes["children"], panes["sizes"]):
            part.pop()
        content["data"] = {name: about for name, about in content["data"].items() if "gpu" not in name}
    return content
