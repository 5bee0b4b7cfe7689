"""Whether a scheduler answers at an address, and what is wrong where none does."""

import asyncio
import os

from distributed.core import rpc
from distributed.security import Security
from distributed.utils import LoopRunner

from daskrun.errors import ClusterError

TLS_FILES = "CA_FILE", "CLIENT__CERT", "CLIENT__KEY"


def reach(address: str, timeout_s: float) -> None:
    """Raise ClusterError unless a scheduler answers at `address` within so many seconds."""
    try:
        # In a thread, as a notebook's own already runs an event loop; the stop button ends the wait.
        LoopRunner().run_sync(_identity, address, timeout_s)
    except (ValueError, TypeError) as error:
        if "ssl_context" in str(error):  # what Dask says where the certificate's files are not set
            names = ", ".join(f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in TLS_FILES)
            raise ClusterError(
                f"{address!r} asks for a certificate, and Dask's settings name none: set {names} to the "
                "paths of its files before Python starts."
            ) from error
        raise ClusterError(f"{address!r} is not a scheduler's address ({error}): write tcp://HOST:PORT.") from error
    except OSError as error:  # also TimeoutError
        cause: BaseException = error
        while cause.__cause__:  # the first cause says most, such as a certificate that is not trusted
            cause = cause.__cause__
        why = f" ({cause})" if str(cause) else ""
        is_set = address == os.environ.get("DASK_SCHEDULER_ADDRESS")
        else_here = "; or unset DASK_SCHEDULER_ADDRESS to start a cluster on this machine" if is_set else ""
        raise ClusterError(
            f"No Dask scheduler answered at {address!r} within {timeout_s} s{why}. Check that it runs, "
            "that it is tcp:// or tls:// as you write, and that this is the scheduler's port, not the "
            f"dashboard's{else_here}."
        ) from error


async def _identity(address: str, timeout_s: float) -> object:
    # Client's own timeout never ends a connection to something that listens but is no scheduler.
    security = Security().get_connection_args("client")
    async with asyncio.timeout(timeout_s), rpc(address, connection_args=security) as scheduler:
        return await scheduler.identity()
