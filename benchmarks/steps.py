"""Predict, then pay: what a step of DDP takes on 4 and 8 hosts, from what it takes on one and two; then measured.

    python benchmarks/steps.py [--steps N] [--mbit N]

Needs root, for network namespaces: each rank is a host of its own there, with a link of `--mbit` Mbit/s each way. All
hosts share this machine's cores. So the forward and backward pass of a layer are sleeps, as long as a step in
results/cpu2-ddp.json takes; what is real is DistributedDataParallel, its buckets, gloo, TCP, and the link.

The model. A rank computes for as long as one rank alone does. DDP's buckets become ready evenly over the backward pass,
as their bytes add up, and are sent one after the other. A bucket takes a ring all-reduce 2(n-1) * latency +
2(n-1)/n * bytes / bandwidth; latency and bandwidth are fitted to all-reduces of two ranks. A step ends when the last
bucket has arrived. Nothing is fitted to steps of more than one rank, so these can prove the model wrong.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from record import write_result
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

FORWARD_S, BACKWARD_S = 0.4, 0.8
N_LAYERS, LAYER_NUMBERS = 20, 558_000  # float32: together 44.6 MB, as the gradients of a ResNet-18
N_RANKS = (1, 2, 4, 8)
SIZES = (2**16, 2**18, 2**20, 2**22)  # float32 of an all-reduce
WARM_UP = 3  # DDP makes its buckets again after the first step


class Layer(torch.nn.Module):
    """Weights with gradients of zero, which take the time of a layer to come."""

    def __init__(self, share, n_numbers):
        super().__init__()
        self.weight, self.share = torch.nn.Parameter(torch.zeros(n_numbers)), share

    def forward(self, x):
        return Sleep.apply(x, self.weight, self.share)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, share):
        ctx.weight, ctx.share = weight, share
        time.sleep(FORWARD_S * share)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S * ctx.share)
        return gradient, torch.zeros_like(ctx.weight), None


def one_rank(n_steps):
    """Return the median seconds of a step and of all-reduces of SIZES, and DDP's buckets in bytes, in their order."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # where another rank has failed
    model = torch.nn.Sequential(*[Layer(1 / N_LAYERS, LAYER_NUMBERS) for _ in range(N_LAYERS)])
    model, buckets = DistributedDataParallel(model), {}

    def noting(group, bucket):
        buckets[bucket.index()] = bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, noting)
    x = torch.zeros(1, requires_grad=True)
    steps = timed(lambda: model(x).sum().backward(), WARM_UP + n_steps)[WARM_UP:]
    reduces = {}
    for size in SIZES:
        numbers = torch.zeros(size)
        reduces[4 * size] = statistics.median(timed(lambda numbers=numbers: dist.all_reduce(numbers), n_steps))
    dist.barrier()
    sizes = [buckets[index] for index in sorted(buckets)]
    return {"step_s": statistics.median(steps), "all_reduce_s": reduces, "buckets": sizes}


def timed(action, n_times):
    seconds = []
    for _ in range(n_times):
        dist.barrier()  # ranks would otherwise wait for each other inside the clock
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


@contextmanager
def hosts(n, mbit):
    """Yield the names of `n` network namespaces, host i with 10.0.0.i+1 on eth0; between them a switch of its own."""
    switch, *names = made = [f"steps-{os.getpid()}-{name}" for name in ("switch", *range(n))]
    shape = f"root tbf rate {mbit}mbit burst 64kb latency 400ms"
    commands = [
        *(f"ip netns add {name}" for name in made),
        f"ip -n {switch} link add dev bridge0 type bridge",
        f"ip -n {switch} link set bridge0 up",
    ]
    for i, name in enumerate(names):
        commands += [
            f"ip link add eth0 netns {name} type veth peer name port{i} netns {switch}",
            f"ip -n {switch} link set port{i} master bridge0 up",
            f"ip -n {name} addr add 10.0.0.{i + 1}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
            f"tc -n {name} qdisc add dev eth0 {shape}",
            f"tc -n {switch} qdisc add dev port{i} {shape}",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def on_hosts(n, mbit, n_steps):
    """Return what `one_rank` returns on rank 0 of `n`."""
    with hosts(n, mbit) as names:
        ranks = []
        for rank, name in enumerate(names):
            setting = {
                "RANK": rank,
                "WORLD_SIZE": n,
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1,
            }
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank-of", str(n_steps)]
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | {key: str(value) for key, value in setting.items()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise click.ClickException(f"the ranks ended with {[rank.returncode for rank in ranks]}; see above")
    return json.loads(outputs[0])


def fit(all_reduce_s):
    """Return (seconds of latency, bytes per second) of the line through two ranks' all-reduces: {bytes: seconds}."""
    sizes, seconds = np.array([int(size) for size in all_reduce_s]), np.array(list(all_reduce_s.values()))
    per_byte, constant = np.polyfit(sizes, seconds, 1, w=1 / seconds)  # each counts as much, whatever its size
    return max(float(constant), 0.0) / 2, 1 / float(per_byte)


def predict(n, compute_s, buckets, latency_s, bytes_per_s, backward=BACKWARD_S / (FORWARD_S + BACKWARD_S)):
    """Return the seconds of a step on `n` ranks. backward: the share of compute_s in which gradients become ready.

    >>> predict(1, 1.0, [100, 100], 0.0, 100.0)
    1.0
    >>> predict(2, 1.0, [100, 100], 0.0, 100.0, backward=0.5)  # the first is ready after 0.75 s, and takes 1 s
    2.75
    """
    end, sent = 0.0, 0
    for n_bytes in buckets:
        sent += n_bytes
        ready = compute_s * (1 - backward * (1 - sent / sum(buckets)))
        takes = 2 * (n - 1) * latency_s + 2 * (n - 1) / n * n_bytes / bytes_per_s
        end = max(end, ready) + takes
    return end


@click.command()
@click.option("--steps", "n_steps", default=9, show_default=True, help=f"Steps that count, after {WARM_UP}.")
@click.option("--mbit", default=200, show_default=True, help="Mbit/s of each host's link, each way.")
@click.option("--rank-of", type=int, hidden=True)
def main(n_steps, mbit, rank_of):
    if rank_of:
        found = one_rank(rank_of)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        return dist.destroy_process_group()
    if os.geteuid():
        raise click.ClickException("making network namespaces needs root: sudo -E python benchmarks/steps.py")
    alone, two = on_hosts(1, mbit, n_steps), on_hosts(2, mbit, n_steps)
    compute_s, buckets, (latency_s, bytes_per_s) = alone["step_s"], two["buckets"], fit(two["all_reduce_s"])
    # Made before anything else is measured.
    predicted = {n: predict(n, compute_s, buckets, latency_s, bytes_per_s) for n in N_RANKS}
    measured = {1: alone, 2: two} | {n: on_hosts(n, mbit, n_steps) for n in N_RANKS[2:]}
    rows = [
        {
            "ranks": n,
            "predicted_s": predicted[n],
            "measured_s": measured[n]["step_s"],
            "error": predicted[n] / measured[n]["step_s"] - 1,
        }
        for n in N_RANKS
    ]
    report(
        rows,
        {
            "mbit": mbit,
            "steps": n_steps,
            "compute_s": compute_s,
            "buckets": buckets,
            "latency_s": latency_s,
            "bytes_per_s": bytes_per_s,
            "all_reduce_s": {n: measured[n]["all_reduce_s"] for n in measured},
        },
    )


def report(rows, about):
    """Print the tables, and write the same as JSON."""
    lines = [
        f"fitted to 1 rank: {about['compute_s']:.3f} s of compute; to 2: {about['bytes_per_s'] * 8e-6:.0f} of "
        f"{about['mbit']} Mbit/s, {about['latency_s'] * 1000:.2f} ms latency",
        "ranks  predicted s  measured s   error",
        *(f"{row['ranks']:5}{row['predicted_s']:13.3f}{row['measured_s']:12.3f}{row['error']:8.1%}" for row in rows),
    ]
    print("\n".join(lines))
    result = about | {"rows": rows, "printed": lines}
    print(f"written to {write_result('steps', result).relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
