"""When a rank is told to end, all ranks save the same step and leave, and the next run resumes from it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from test_train import FIVE_STEPS, Reads, noise, trained

import daskrun
from workshop_utils.checkpoint import load_checkpoint
from workshop_utils.training.preemption import Preempted, heed_sigterm_only_from, sigterm_noticed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


def told_in_step(step, images_a_step, rank=0):
    """Return images; a rank that reads those of this step (from 1) gets a real SIGTERM meanwhile."""

    def told(count):
        if count == (step - 1) * images_a_step and (not dist.is_initialized() or dist.get_rank() == rank):
            os.kill(os.getpid(), signal.SIGTERM)

    return Reads(noise(), told)


@pytest.fixture
def handler():
    handler = signal.getsignal(signal.SIGTERM)
    yield handler
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.usefixtures("handler")
def test_a_signal_in_the_last_step_ends_the_run_and_the_next_start_returns_its_numbers(tmp_path):
    settings = {**FIVE_STEPS, "val_set": noise(7), "checkpoint": tmp_path / "run.pt"}
    with pytest.raises(Preempted, match="step 5"):
        trained(told_in_step(5, 16), **settings)
    numbers, _ = trained(**settings)
    assert (numbers["resumed_at"], numbers["steps"]) == (5, 5) and 0 <= numbers["accuracy"] <= 1


@pytest.fixture
def told():
    """A list that grows with each SIGTERM that this process is left to answer."""
    told, before = [], signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    yield told
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_nobody_has_answered_comes_again(told):
    with sigterm_noticed():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not told
    assert told == [1]
    with pytest.raises(Preempted), sigterm_noticed():
        os.kill(os.getpid(), signal.SIGTERM)
        raise Preempted(1, [0], "run.pt")
    assert told == [1]


def test_without_a_checkpoint_there_is_nothing_to_save_and_the_signal_does_what_it_did_before(told):
    trained(told_in_step(2, 16), **FIVE_STEPS)
    assert told == [1]


def use_native_threads():
    """Run an operation after which a fork of this process has a thread from its beginning."""
    torch.backends.quantized.engine, before = "qnnpack", torch.backends.quantized.engine
    torch.ao.nn.quantized.Linear(8, 8)(torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.quint8))
    torch.backends.quantized.engine = before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_child_that_reads_images_outlives_a_signal_to_all_processes_but_not_its_parents(tmp_path):
    use_native_threads()
    numbers, _ = trained(told_in_step(3, 16), num_workers=1, **FIVE_STEPS)  # the child signals itself
    assert numbers["steps"] == 5
    context = multiprocessing.get_context("fork")
    heeds = context.Event()
    process = context.Process(target=lambda: (heed_sigterm_only_from(os.getppid()), heeds.set(), time.sleep(1000)))
    process.start()
    assert heeds.wait(120)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.weekly
def test_a_child_of_a_fork_server_ends_after_its_parent(tmp_path):
    """On a GPU, DataLoader has such children; DataLoader itself looks only whether the server is there."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, time\n"
        "from workshop_utils.training.preemption import heed_sigterm_only_from\n"
        "def child(parent):\n"
        "    heed_sigterm_only_from(parent)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('forkserver').Process(target=child, args=(os.getpid(),)).start()\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.parent().pid != parent.pid
        parent.kill()
    child.wait(120)


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fork_server_of_a_ranks_children_is_deaf_to_sigterm_also_in_a_fresh_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, re, signal, torch\n"
        "from workshop_utils.training.batches import batch_loader, started\n"
        "class Family(torch.utils.data.Dataset):\n"
        "    def __getitem__(self, index):\n"
        "        return os.getpid(), os.getppid()\n"
        "if __name__ == '__main__':\n"
        "    torch.cuda.is_available = lambda: True\n"
        "    loader = batch_loader(Family(), [[0]], num_workers=1)\n"
        "    loader.pin_memory = False\n"
        "    (child,), (server,) = next(started(loader))\n"
        "    for pid in (child, server):\n"
        "        status = pathlib.Path(f'/proc/{pid}/status').read_text()\n"
        "        blocked = int(re.search(r'SigBlk:\\s*(\\w+)', status)[1], 16)\n"
        "        print(bool(blocked >> (signal.SIGTERM - 1) & 1))\n"
    )
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=200).stdout
    assert said.split() == ["True", "True"]


def test_one_rank_is_told_and_both_save_the_same_step(client, tmp_path):
    checkpoint = str(tmp_path / "run.pt")

    def teach(told):
        images, before = told_in_step(3, 8, rank=1) if told else noise(), signal.getsignal(signal.SIGTERM)
        try:
            return trained(images, checkpoint=checkpoint, **FIVE_STEPS)[0]
        finally:
            assert signal.getsignal(signal.SIGTERM) == before, "the handler stays"

    with pytest.raises(Preempted, match="Rank 1 .*step 3"):
        daskrun.run(client, teach, True)
    assert load_checkpoint(checkpoint)["training"]["step"] == 3
    assert [numbers["resumed_at"] for numbers in daskrun.run(client, teach, False)] == [3, 3]


def test_a_job_that_is_stopped_has_saved_its_last_step(client, tmp_path):
    checkpoint = str(tmp_path / "run.pt")
    settings = {**FIVE_STEPS, "epochs": 10_000, "checkpoint": checkpoint, "checkpoint_every": 10**6}
    job = daskrun.launch(client, trained, kwargs=settings)
    next(job.rows())
    job.stop()
    with pytest.raises(Preempted) as stopped:
        job.result()
    assert load_checkpoint(checkpoint)["training"]["step"] == stopped.value.args[0] >= 1


def test_outside_of_the_main_thread_the_handler_stays(handler):
    seen = []

    def work():
        with sigterm_noticed():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
