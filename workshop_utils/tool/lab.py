"""Open JupyterLab with a notebook on the left and Dask's dashboards on the right.

`workspace.json` says what lies where; `overrides.json` has what a user would set under Settings: where the dashboards
are, and no question about news over the lesson.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from workshop_utils.cluster import LOOPBACK
from workshop_utils.storage import cache_folder

FIRST = "notebooks/01-getting-started.ipynb"


def open_lab(project: Path, *, port: int | None = None, browser: bool = True, extra: Sequence[str] = ()) -> None:
    """Run JupyterLab in the folder `project` until it is stopped; listens on loopback and asks for its token.

    Its layout is set anew at each start, in the workshop's cache folder; the user's own settings are left alone.
    extra: more arguments of `jupyter lab`. Raises ClickException where `project` lacks the first notebook.
    """
    if not (project / FIRST).is_file():
        raise click.ClickException(f"There is no {FIRST} in {project}: run this in the folder of the workshop.")
    from jupyterlab.labapp import LabApp
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    here, home = Path(__file__).parent, cache_folder() / "lab"
    (home / "settings").mkdir(parents=True, exist_ok=True)
    shutil.copy(here / "overrides.json", home / "settings")
    WorkspacesManager(str(home / "workspaces")).save("workshop", (here / "workspace.json").read_text(encoding="utf-8"))
    ours = [
        f"--ServerApp.root_dir={project}",
        f"--ServerApp.ip={LOOPBACK}",
        "--ServerApp.allow_root=True",  # the usual user in a container
        "--LabApp.default_url=/lab/workspaces/workshop",
        f"--LabApp.workspaces_dir={home / 'workspaces'}",
        f"--LabApp.app_settings_dir={home / 'settings'}",
        *([f"--ServerApp.port={port}"] if port else []),
        *([] if browser else ["--ServerApp.open_browser=False", "--LabApp.open_browser=False"]),
    ]
    LabApp.launch_instance([*ours, *extra])
