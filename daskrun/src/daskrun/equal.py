"""Compare the models of all ranks, to the bit."""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from daskrun.errors import ranks_do, ranks_named

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

CANNOT = "cannot be compared"  # stands for the shape of a tensor that has no hash
ONLY_BUFFERS = (
    "Only buffers differ, such as BatchNorm's statistics, which each rank collects from its own images. DDP copies "
    "rank 0's before the next forward pass: give buffers=False to compare weights alone."
)
SAME_MODEL = "Build the same model on all ranks."
SAME_UPDATES = "Call the DDP model itself, not its .module; end no_sync; change weights on all ranks alike."


def assert_equal_on_all_ranks(model: "Module", *, buffers: bool = False) -> None:
    """Raise AssertionError on all ranks, with the first tensor that differs and on which, unless the models are equal.

    Equal is to the bit, so -0.0 differs from 0.0. All ranks of a process group call it together; without a group, as
    under Horovod, nothing is compared. buffers: True also compares buffers. Those of BatchNorm are statistics of each
    rank's own images, which DDP makes equal only when the next forward pass begins.
    Raises TypeError on all ranks for a model whose numbers cannot be compared, such as one in shards.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    tensors = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    ranks: list[dict[str, tuple[str, str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: _digest(tensor) for name, tensor in tensors.items()})
    differing = {}
    names = list(dict.fromkeys(name for rank in ranks for name in rank))  # a rank may lack some
    for name in names:
        found = [rank.get(name) for rank in ranks]
        if wrong := [one[1] for one in found if one and one[0] == CANNOT]:
            of = ranks_named([rank for rank, one in enumerate(found) if one and one[0] == CANNOT])
            raise TypeError(f"{name} of {of} cannot be compared, as it {wrong[0]}.")
        if len(set(found)) > 1:
            differing[name] = found
    if differing:
        name, found = next(iter(differing.items()))
        how, cure = _difference(found)
        if cure == SAME_UPDATES and not differing.keys() & dict(model.named_parameters()).keys():
            cure = ONLY_BUFFERS
        raise AssertionError(
            f"The ranks' models differ, first in {name}: {how}. {len(differing)} of {len(names)} tensors differ. {cure}"
        )


def _digest(tensor: "Tensor") -> tuple[str, str]:
    """Return (a tensor's type and shape, a hash of its bits); CANNOT and why, where there is none."""
    import torch

    if hasattr(tensor, "to_local"):
        return CANNOT, "is in shards, of which each rank holds its own part"
    has_no_values = torch.nn.parameter.is_lazy(tensor) or tensor.device.type == "meta"
    if has_no_values or tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return CANNOT, "has no values yet, or none in rows (nested, quantized or sparse): make it a plain tensor first"
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)}", digest


def _difference(found: list[tuple[str, str] | None]) -> tuple[str, str]:
    """Return (how a tensor differs, what to do). found: what `_digest` returned on each rank, None where it is not."""
    there = [one for one in found if one]
    if len(there) < len(found):
        without = [rank for rank, one in enumerate(found) if one is None]
        return f"{ranks_do(without, 'has', 'have')} no such tensor", SAME_MODEL
    shapes = [shape for shape, _ in there]
    alike = len(set(shapes)) == 1
    seen: list = there if alike else shapes
    usual = Counter(seen).most_common(1)[0][0]  # rank 0's where none has a majority
    odd = ranks_do([rank for rank, one in enumerate(seen) if one != usual], "has", "have")
    if alike:
        return f"{odd} other values than rank {seen.index(usual)}", SAME_UPDATES
    return f"{odd} another shape or type than rank {seen.index(usual)}", SAME_MODEL
