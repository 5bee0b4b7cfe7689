"""Run a PyTorch function on Dask workers as the ranks of one `torch.distributed` process group."""

from functools import partial

from workshop_utils.job import Job, JobError, environment, network_interface


def launch(client, fn, /, *args, n_workers=None, backend="auto", timeout=None, max_restarts=0, **kwargs):
    """Start `fn(*args, **kwargs)` as one rank per worker process, and return the `Job` at once.

    The function finds its rank and world size in `torch.distributed`, whose process group is made before it runs and
    destroyed after it. A rank's own GPU, where it has one, is cuda:0.

    n_workers: the world size; None for all workers. backend: "nccl", "gloo", or "auto" for NCCL where every rank has a
    GPU of its own (tensors on the CPU then still go through gloo), else gloo.
    timeout: seconds that the whole job may take; None for no limit.
    max_restarts: how often the function is started anew, on all ranks, after the death of a worker; it should then
    continue from its checkpoint. An exception is never retried.

    A rank that raises ends the job with that rank's exception. Whatever ends it, the workers are free for the next.
    Raises JobError where there are too few workers, WorkersBusy where they are at work, TypeError where the function
    or an argument cannot be pickled.
    """
    bootstrap = partial(_in_process_group, backend=backend)
    return Job(client, bootstrap, fn, args, kwargs, n_workers=n_workers, timeout=timeout, max_restarts=max_restarts)


def run(client, fn, /, *args, **kwargs):
    """Return `launch(...).result()`: what each rank returned, in rank order."""
    return launch(client, fn, *args, **kwargs).result()


def _in_process_group(run, store, rank, world_size, *, backend):
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp

    outcome = []

    def body():
        # One that leaves while another still connects would break that one's gloo for its process's life.
        store.set(f"joined-{rank}", "")
        store.wait([f"joined-{other}" for other in range(world_size)])
        try:
            outcome.append((run(), None))
        except BaseException as error:
            outcome.append((None, error))

    backend = _backend(backend, store, rank, world_size)
    with environment(_settings()):
        try:
            dispatch_with_ddp(body, store.host, store.port, rank, world_size, backend=backend)
        except Exception as error:
            # It destroys the group in a `finally`, even if there is none because that could not be made, which is then
            # the error to report, or because the function has destroyed it, which is no error.
            if not outcome:
                raise error.__context__ or error from None
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _backend(backend, store, rank, world_size):
    """Return the backend for all ranks, once each has told the others which GPU it has."""
    store.set(f"gpu-{rank}", _gpu())
    gpus = [store.get(f"gpu-{other}").decode() for other in range(world_size)]
    own = all(gpus) and len(set(gpus)) == world_size
    if backend == "nccl" and not own:
        raise JobError(f"backend='nccl' needs a GPU of its own for each rank, but the ranks have {gpus}: "
                       "write backend='auto' or 'gloo'.")  # fmt: skip
    if backend == "auto":
        return "cpu:gloo,cuda:nccl" if own else "gloo"
    return backend


def _gpu():
    import torch

    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


def _settings():
    # The store at MASTER_ADDR is served already, as torchrun's agent serves its own: no port is guessed.
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    interface = network_interface()
    return {"TORCHELASTIC_USE_AGENT_STORE": "True"} | dict.fromkeys(names if interface else (), interface)
