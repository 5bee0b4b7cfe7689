"""Whether a scheduler answers at an address, and what is wrong where none does."""

import asyncio
from typing import Any

from distributed.comm.addressing import get_address_host_port
from distributed.core import rpc
from distributed.security import Security
from distributed.utils import LoopRunner

from daskrun.errors import ClusterError

TLS_FILES = "CA_FILE", "CLIENT__CERT", "CLIENT__KEY"


def reach(address: str, timeout_s: float = 30, otherwise: str = "") -> None:
    """Raise ClusterError, without Dask's own errors, unless a scheduler answers at `address` within so many seconds.

    otherwise: what else to do, for the error of an address at which nothing answers.
    """
    try:
        host, port = get_address_host_port(address)
        if not host or not 0 < port < 2**16:
            raise ValueError("it has no host, or a port that is not from 1 to 65535")
    except (ValueError, TypeError) as error:
        raise ClusterError(f"{address!r} is not a scheduler's address ({error}): write tcp://HOST:PORT.") from None
    try:
        # In a thread, as a notebook's own already runs an event loop; the stop button ends the wait.
        found = LoopRunner().run_sync(_identity, address, timeout_s)
    except TypeError as error:
        if "ssl_context" in str(error):  # what Dask says where the certificate's files are not set
            names = ", ".join(f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in TLS_FILES)
            raise ClusterError(
                f"{address!r} asks for a certificate, and Dask's settings name none: set {names} to the "
                "paths of its files before Python starts."
            ) from None
        raise _no_scheduler(address) from None
    except OSError as error:  # also TimeoutError
        cause: BaseException = error
        while cause.__cause__:  # the first cause says most, such as a certificate that is not trusted
            cause = cause.__cause__
        why = getattr(cause, "strerror", None) or str(cause) or f"nothing was heard within {timeout_s} s"
        raise ClusterError(
            f"No Dask scheduler answered at {address!r} ({why}). Check that it runs and is not stopped, "
            "whether it listens at tcp:// or at tls://, and that this is the scheduler's port, not the "
            f"dashboard's{otherwise}."
        ) from None
    except RuntimeError as error:  # as of require-encryption
        raise ClusterError(f"Dask's settings refuse {address!r}: {error}") from None
    except Exception:  # whatever Dask makes of bytes that are no message of its own
        raise _no_scheduler(address) from None
    if "workers" not in found:
        raise ClusterError(f"At {address!r} is a {found['type'].lower()}: give the address of its scheduler.")


def _no_scheduler(address: str) -> ClusterError:
    return ClusterError(f"What answers at {address!r} is no Dask scheduler: check host and port.")


async def _identity(address: str, timeout_s: float) -> Any:
    # Client's own timeout never ends a connection to something that listens but is no scheduler.
    security = Security().get_connection_args("client")
    asked = rpc(address, timeout=timeout_s, connection_args=security)
    async with asyncio.timeout(timeout_s + 1), asked as scheduler:  # its own error comes first, and says why
        return await scheduler.identity()
