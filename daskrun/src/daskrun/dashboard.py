"""Show the page of ranks in the dashboard of a scheduler: `dask scheduler --preload daskrun.dashboard`.

Jobs ask for it by themselves. A scheduler without a dashboard has no page, and nothing else changes.
"""

import logging
import sys
from typing import Any

PAGE, PANE = "/ranks", "/individual-ranks"


def show(dask_scheduler: Any = None) -> None:
    """Give the scheduler's dashboard the page and the pane, and its menus their names, if they are not there yet."""
    if "distributed.dashboard.scheduler" not in sys.modules:  # it has no dashboard, or no bokeh
        return
    try:
        _show(dask_scheduler)
    except Exception:  # such as of another version of Dask: jobs go on without it
        logging.getLogger(__name__).warning("The dashboard has no page of ranks.", exc_info=True)


def dask_setup(scheduler: Any) -> None:
    """Be a preload of `dask scheduler`."""
    show(scheduler)


def _show(scheduler: Any) -> None:
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard import scheduler as dashboard

    from daskrun.page import pane_doc, ranks_doc

    served = scheduler.http_application.applications
    first = next((app for app in served if isinstance(app, BokehTornado)), None)
    menus = dashboard.template_variables(scheduler)
    if first is None or PAGE.strip("/") in menus["pages"]:
        return
    menus["pages"].insert(1, PAGE.strip("/"))
    if PAGE in first.app_paths:  # an earlier scheduler of this process had it
        return
    dashboard.applications.update({PAGE: ranks_doc, PANE: pane_doc})
    if not any(plot["name"] == "Ranks" for plot in menus["plots"]):
        menus["plots"].append({"url": PANE.strip("/"), "name": "Ranks"})
    # One that runs takes no new page. What lists panes, for JupyterLab, reads the first.
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, first.prefix.strip("/"))
    served.insert(0, served.pop())
