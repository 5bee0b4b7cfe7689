"""Compare the models of all ranks, to the bit."""

import hashlib
from typing import TYPE_CHECKING

from daskrun.errors import ranks_do

if TYPE_CHECKING:
    from torch.nn import Module


def assert_equal_on_all_ranks(model: "Module", *, buffers: bool = False) -> None:
    """Raise AssertionError on all ranks, with the first tensor that differs and on which, unless the models are equal.

    Equal is to the bit, so -0.0 differs from 0.0. All ranks of a process group call it together; without a group, as
    under Horovod, nothing is compared.

    Args:
        model: Whose parameters are compared; one that isn't in shards.
        buffers: Whether buffers are, too. Those of BatchNorm are statistics of each rank's own images, which DDP makes
            equal only when the next forward pass begins.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    tensors = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    mine = {}
    for name, tensor in tensors.items():
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        mine[name] = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(bits, digest_size=16).hexdigest()}"
    ranks: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    names = dict.fromkeys(name for rank in ranks for name in rank)  # a rank may lack some
    differing = [name for name in names if len({rank.get(name) for rank in ranks}) > 1]
    if differing:
        odd = [number for number, rank in enumerate(ranks) if rank.get(differing[0]) != ranks[0].get(differing[0])]
        raise AssertionError(
            f"The ranks' models differ, first in {differing[0]}: {ranks_do(odd, 'has', 'have')} other values than "
            f"rank 0. {len(differing)} of {len(names)} tensors differ. Call the DDP model itself, not its .module; end "
            "no_sync; change weights on all ranks alike."
        )
