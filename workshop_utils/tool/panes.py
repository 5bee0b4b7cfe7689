"""JupyterLab's panes: the dashboard of the cluster that start_cluster wrote into a file, wherever that cluster is."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_server.utils import url_path_join
from jupyter_server_proxy.handlers import ProxyHandler
from tornado.httpclient import AsyncHTTPClient
from tornado.web import Application, HTTPError

from workshop_utils.cluster import ID_PAGE


def serve_dashboard(web_app: Application, base_url: str, panes: Path) -> None:
    """Serve the dashboard below the server's address. panes: the file, a list of host, port and scheduler's id."""
    settings = {"panes": panes, "host_allowlist": lambda handler, host: True}  # hosts come from the file alone
    web_app.add_handlers(".*$", [(url_path_join(base_url, "workshop/dashboard(.*)"), Dashboard, settings)])


class Dashboard(ProxyHandler):  # type: ignore[misc]  # it has no types
    """Passes on what a pane asks for, and tells JupyterLab which plots there are."""

    shown: str | None = None  # id of the scheduler that the panes show

    def initialize(self, panes: Path) -> None:
        """Take what `serve_dashboard` gives."""
        self._panes = panes

    async def http_get(self, path: str) -> None:
        """Answer a request."""
        if path == "/individual-plots.json":  # JupyterLab asks for it every four seconds
            self.finish(await self._plots())
        else:
            try:
                host, port, _ = self._found()
                await self.proxy(host, port, path)
            except Exception as error:
                raise HTTPError(503, "No cluster answers: start_cluster in a notebook starts one.") from error

    async def open(self, path: str) -> None:
        """Open the connection by which a plot is drawn."""
        try:
            host, port, _ = self._found()
            await self.proxy_open(host, port, path)
        except Exception:  # a pane connects again when its cluster is gone, as after a restart of the kernel
            self.close()

    def proxy_request_headers(self) -> Any:
        """Return what is passed on of a request's headers."""
        # The cluster may be on another host, or its port another user's by now: neither may learn who we are.
        headers = super().proxy_request_headers()
        for secret in ("Authorization", "Cookie"):
            headers.pop(secret, None)
        return headers

    def _found(self):
        host, port, scheduler = json.loads(self._panes.read_text())
        return host, port, scheduler

    async def _plots(self):
        # Answer with no plots while there is no cluster, and once when there is another: then the panes drop what they
        # show and load the next. After an error JupyterLab would ask less often, in the end every two minutes.
        before, Dashboard.shown = Dashboard.shown, None
        with suppress(Exception):  # no cluster yet, or it is gone, or does not answer in time
            host, port, scheduler = self._found()
            if await _fetch(host, port, ID_PAGE) == scheduler:  # another may have the port of one that is gone
                Dashboard.shown = scheduler
                if before in (None, scheduler):
                    return json.loads(await _fetch(host, port, "individual-plots.json"))
        return {}


async def _fetch(host, port, path):
    answer = await AsyncHTTPClient().fetch(f"http://{host}:{port}/{path}", request_timeout=5)
    return answer.body.decode()
