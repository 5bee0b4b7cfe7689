"""Open JupyterLab with a notebook on the left and Dask's dashboards on the right."""

import json
import sys

from workshop_utils.cluster import DASHBOARD_PORT, LOOPBACK
from workshop_utils.data import cache_folder

FIRST = "notebooks/01-getting-started.ipynb"
DASHBOARDS = ("Task Stream", "Progress", "Workers Memory")
WORKSPACE = "workshop"
# What a user would set under Settings: where the dashboards are, and no question about news over the lesson.
OVERRIDES = {
    "dask-labextension:plugin": {"defaultURL": f"http://{LOOPBACK}:{DASHBOARD_PORT}"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}


def open_lab(project, *, port=None, browser=True, extra=()):
    """Run JupyterLab in the folder `project` until it is stopped; listens on loopback and asks for its token.

    Its layout is set anew at each start, in the workshop's cache folder; the user's own settings are left alone.
    extra: more arguments of `jupyter lab`. Raises FileNotFoundError where `project` lacks the first notebook.
    """
    if not (project / FIRST).is_file():
        raise FileNotFoundError(f"There is no {FIRST} in {project}: run this in the folder of the workshop.")
    from jupyterlab.labapp import LabApp
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    home = cache_folder() / "lab"
    (home / "settings").mkdir(parents=True, exist_ok=True)
    (home / "settings" / "overrides.json").write_text(json.dumps(OVERRIDES), encoding="utf-8")
    WorkspacesManager(str(home / "workspaces")).save(WORKSPACE, json.dumps(layout()))
    given = {
        "ServerApp.root_dir": project,
        "ServerApp.ip": LOOPBACK,
        "ServerApp.allow_root": True,  # the usual user in a container
        "LabApp.default_url": f"/lab/workspaces/{WORKSPACE}",
        "LabApp.workspaces_dir": home / "workspaces",
        "LabApp.app_settings_dir": home / "settings",
        **({"ServerApp.port": port} if port else {}),
        **({} if browser else {"ServerApp.open_browser": False, "LabApp.open_browser": False}),
    }
    ours = [f"--{name}={value}" for name, value in given.items()]
    sys.argv = ["jupyter-lab", *ours, *extra]
    LabApp.launch_instance()


def layout():
    """Return the JupyterLab workspace: the first notebook, and beside it one panel for each of DASHBOARDS."""
    notebook = f"notebook:{FIRST}"
    panels = {f"dask-dashboard-launcher:{_route(name)}": name for name in DASHBOARDS}
    tabs = [{"type": "tab-area", "currentIndex": 0, "widgets": [widget]} for widget in panels]
    right = {"type": "split-area", "orientation": "vertical", "sizes": [1 / len(tabs)] * len(tabs), "children": tabs}
    left = {"type": "tab-area", "currentIndex": 0, "widgets": [notebook]}
    main = {"type": "split-area", "orientation": "horizontal", "sizes": [0.6, 0.4], "children": [left, right]}
    data = {
        "layout-restorer:data": {
            "main": {"dock": main, "current": notebook},
            "left": {"collapsed": True, "visible": True, "widgets": []},
            "right": {"collapsed": True, "visible": True, "widgets": []},
        },
        notebook: {"data": {"path": FIRST, "factory": "Notebook"}},
    }
    for widget, name in panels.items():
        data[widget] = {"data": {"item": {"route": _route(name), "label": name, "key": name}}}
    return {"data": data, "metadata": {"id": WORKSPACE}}


def _route(name):
    return "/individual-" + name.lower().replace(" ", "-")
