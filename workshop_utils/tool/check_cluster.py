"""Look whether a running cluster suits the workshop, and name the cure for whatever is missing."""

import uuid
import warnings
from collections.abc import Iterator
from functools import partial

from distributed import Client

from workshop_utils import ddp, storage
from workshop_utils.cluster import describe_workers, start_cluster, unfit_for_pytorch
from workshop_utils.tool.check import Unfit, look_at


def run_cluster_checks(address: str) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, ok, text) for each thing the workshop needs of the cluster at `address`; see `check.run_checks`.

    Where the cluster cannot be joined, that is the only one.
    """
    joined: list[Client] = []

    def join() -> str:
        with warnings.catch_warnings(action="ignore"):  # a check of its own says it
            joined.append(start_cluster(address=address))
        workers = describe_workers(joined[0])
        on = f"{len(workers)} workers on {workers.host.nunique()} host(s), {(workers.device != 'cpu').sum()} with a GPU"
        return f"{on}; its versions are this process's"

    yield look_at("scheduler and workers", join, "workshop join ADDRESS on each machine")
    if joined:
        with joined[0] as client:
            for name, look, cure in LOOKS:
                yield look_at(name, partial(look, client), cure)


def _environment(client: Client) -> str:
    wrong, _ = unfit_for_pytorch(client)
    if wrong:
        raise Unfit("; ".join(wrong))
    return "no MALLOC_TRIM_THRESHOLD_, not daemonic, a share of the cores for each"


def _children(client: Client) -> str:
    return f"{sum(client.run(_load_in_a_child).values())} workers may start DataLoader's processes"


def _shared(client: Client) -> str:
    folder = storage.shared_folder()
    address, said = f"{folder}/client", uuid.uuid4().bytes
    fs, path = storage.open_address(address)
    fs.makedirs(fs._parent(path), exist_ok=True)
    fs.pipe_file(path, said)
    heard = client.run(_answer, folder, said.hex())
    fs.invalidate_cache()
    silent = [worker for worker, name in heard.items() if fs.cat_file(f"{fs._parent(path)}/{name}") != said]
    fs.rm(fs._parent(path), recursive=True)
    if silent:
        raise Unfit(f"{folder} of {silent[0]} is not this machine's")
    return f"{folder.rpartition('/')[0]} is read and written by this machine and {len(heard)} workers"


def _ranks(client: Client) -> str:
    with warnings.catch_warnings(action="ignore"):
        interfaces = ddp.run(client, _meet, timeout=120)
    return f"{len(interfaces)} met and added up, over {', '.join(sorted(set(map(str, interfaces))))}"


def _load_in_a_child() -> bool:
    from torch.utils.data import DataLoader

    return list(DataLoader([0, 1], batch_size=None, num_workers=1)) == [0, 1]  # type: ignore[arg-type]


def _answer(folder: str, said: str) -> str:
    fs, path = storage.open_address(f"{folder}/client")
    if fs.cat_file(path).hex() != said:
        raise Unfit(f"{path} is another file here")
    name = uuid.uuid4().hex
    fs.pipe_file(f"{fs._parent(path)}/{name}", bytes.fromhex(said))
    return name


def _meet() -> str | None:
    import torch
    import torch.distributed as dist

    from workshop_utils.job.rank import network_interface

    dist.all_reduce(total := torch.ones(1))
    if total.item() != dist.get_world_size():
        raise Unfit(f"the sum over {dist.get_world_size()} ranks was {total.item()}")
    return network_interface()


ENVIRONMENT = 'on each machine: eval "$(workshop worker-env)", then dask worker ADDRESS; or workshop join ADDRESS'
LOOKS = (
    ("environment", _environment, ENVIRONMENT),
    ("children", _children, ENVIRONMENT),
    ("shared storage", _shared, "export WORKSHOP_SHARED=s3://BUCKET/FOLDER, here and where the workers start"),
    ("ranks", _ranks, "open all ports between the workers' machines"),
)
