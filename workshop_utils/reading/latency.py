"""A TCP proxy on loopback that holds back each HTTP request, as storage in another place does."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from subprocess import PIPE

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 2**16


@contextmanager
def hold_back_requests(endpoint: str, delay_s: float) -> Iterator[str]:
    """Yield the address of a proxy that passes each request on to `endpoint` after so many seconds.

    Held back are the first bytes that arrive on a connection after its last answer: each request once, however many
    packets it and its answer have. Opening a connection takes no longer, and no connection waits for another.
    """
    command = [sys.executable, "-I", __file__, endpoint.rpartition(":")[2], str(delay_s)]
    # A session of its own spares it Jupyter's stop button.
    with subprocess.Popen(command, text=True, start_new_session=True, stdin=PIPE, stdout=PIPE) as proxy:
        assert proxy.stdout
        yield f"http://{LOOPBACK}:{proxy.stdout.readline().strip()}"  # leaving closes its stdin: the end


async def _serve(port, delay_s):
    server = await asyncio.start_server(partial(_connect, port, delay_s), LOOPBACK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it, or dies
    os._exit(0)  # asyncio would report each connection that is still open


async def _connect(port, delay_s, from_client, to_client):
    from_server, to_server = await asyncio.open_connection(LOOPBACK, port)
    answered = asyncio.Event()
    answered.set()

    async def before_request():
        if answered.is_set():
            answered.clear()
            await asyncio.sleep(delay_s)

    async def before_answer():
        answered.set()

    await asyncio.gather(_pump(from_client, to_server, before_request), _pump(from_server, to_client, before_answer))


async def _pump(reader, writer, before):
    with suppress(ConnectionError):  # either side may leave when it likes
        while data := await reader.read(CHUNK_BYTES):
            await before()
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
