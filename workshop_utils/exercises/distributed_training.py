"""Checks of notebook 06 · Distributed training."""

from distributed import Client

from workshop_utils import ddp
from workshop_utils.exercises import Answer, NotYet, exercise, expect, passed


@exercise
def check_global_mean(function: Answer, client: Client) -> None:
    def on_each_rank():
        import torch.distributed as dist

        return function(10.0 * (dist.get_rank() + 1)), dist.get_world_size()

    try:
        answers = ddp.run(client, on_each_rank, timeout=30)
    except TimeoutError:
        raise NotYet("the ranks wait for each other: each of them has to call all_reduce, once.") from None
    world_size = answers[0][1]
    means = [None if mean is None else float(mean) for mean, _ in answers]
    expect(None not in means, "global_mean returns None; return the mean as a number.")
    expected = sum(10.0 * (rank + 1) for rank in range(world_size)) / world_size
    summed = means != [expected] * world_size and means == [world_size * expected] * world_size
    expect(not summed, "that is the sum: divide it by the world size.")
    expect(means == [expected] * world_size,
           f"the ranks had {[10.0 * (rank + 1) for rank in range(world_size)]} and returned {means}.")  # fmt: skip
    passed("One number, the same on every rank.")


@exercise
def check_my_share(function: Answer) -> None:
    for n_images, world_size in [(8, 2), (7, 2), (96, 4), (1, 2), (5, 3)]:
        shares = [function(n_images, rank, world_size) for rank in range(world_size)]
        expect(all(share is not None for share in shares), "my_share returns None; return a list of positions.")
        shares = [list(share) for share in shares]
        given = [position for share in shares for position in share]
        about = f"with {n_images} images and {world_size} ranks, the shares are {shares}"
        expect(set(given) >= set(range(n_images)), f"{about}: somebody has to take every image.")
        expect(set(given) <= set(range(n_images)), f"{about}: there is no such image.")
        expect(len(given) == n_images, f"{about}: an image is counted twice.")
        sizes = [len(share) for share in shares]
        expect(max(sizes) - min(sizes) <= 1, f"{about}: the last rank waits for the longest; share more evenly.")
    passed("Every image counts once, whatever the world size.")
