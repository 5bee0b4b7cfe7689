"""Whether a scheduler answers at an address, and what is wrong where none does."""

import asyncio

from distributed.comm.addressing import get_address_host_port
from distributed.core import rpc
from distributed.security import Security
from distributed.utils import LoopRunner

from daskrun.errors import ClusterError


def reach(address: str, timeout_s: float = 30, otherwise: str = "") -> None:
    """Raise ClusterError, without Dask's own errors, unless a scheduler answers at `address` within so many seconds.

    otherwise: what else to do, for the error of an address at which nothing answers.
    """

    async def identity() -> dict:
        # Client's own timeout never ends a connection to something that listens but is no scheduler.
        security = Security().get_connection_args("client")
        asked = rpc(address, timeout=timeout_s, connection_args=security)
        async with asyncio.timeout(timeout_s + 1), asked as scheduler:  # its own error comes first, and says why
            return await scheduler.identity()

    try:
        host, port = get_address_host_port(address)
        if not host or not 0 < port < 2**16:
            raise ValueError("it has no host, or a port that is not from 1 to 65535")
    except (ValueError, TypeError) as error:
        raise ClusterError(f"{address!r} is not a scheduler's address ({error}): write tcp://HOST:PORT.") from None
    try:
        # In a thread, as a notebook's own already runs an event loop; the stop button ends the wait.
        found = LoopRunner().run_sync(identity)
    except Exception as error:  # whatever Dask makes of bytes that are no message of its own
        cause: BaseException = error
        while cause.__cause__:  # the first cause says most, such as a certificate that is not trusted
            cause = cause.__cause__
        why = str(cause) or f"nothing was heard within {timeout_s} s"
        raise ClusterError(
            f"No Dask scheduler answered at {address!r} ({why}). Check that it runs and is not stopped, whether it "
            "listens at tcp:// or at tls://, for which Dask's settings under distributed.comm.tls name the "
            f"certificates, and that this is the scheduler's port, not the dashboard's{otherwise}."
        ) from None
    if "workers" not in found:
        raise ClusterError(f"At {address!r} is a {found['type'].lower()}: give the address of its scheduler.")
