"""A small GPT that learns pet names letter by letter, for the notebooks about models that are too large for one GPU."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from workshop_utils.pet_names import CHARACTERS, MAX_LENGTH

CONTEXT = MAX_LENGTH + 2  # codes of a name: a zero in front, the letters, and a stop


class Block(nn.Module):
    """One transformer block: causal attention and two linear layers, each added to its input.

    Shape:
        Input and output: (n, length, width).
    """

    def __init__(self, width: int, n_heads: int = 8) -> None:
        super().__init__()
        if width % n_heads:
            raise ValueError(f"width is {width}: let it be a multiple of {n_heads}, as each head gets an equal part.")
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (n, heads, length, width / heads)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """Predict the next letter of a name at each of its positions.

    Args:
        width: Numbers that describe a letter; a multiple of 8, as each block has 8 heads.
        depth: Number of blocks.

    Shape:
        Input: (n, length) int64 codes, length up to ``CONTEXT``.
        Output: (n, length, 32) logits.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.letters(codes) + self.positions.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encode(names: Sequence[str]) -> torch.Tensor:
    """Return names as (n, CONTEXT) int64 codes: a zero, the letters, a stop, and zeros to the end.

    Raises:
        ValueError: If a name has other characters, or is longer than ``MAX_LENGTH``; see ``pet_names.clean``.
    """
    code_of = {letter: code for code, letter in enumerate(CHARACTERS) if letter}
    codes = torch.zeros(len(names), CONTEXT, dtype=torch.long)
    for row, name in zip(codes, names, strict=True):
        if len(name) > MAX_LENGTH or not set(name) <= set(code_of):
            raise ValueError(f"{name!r} is too long or has other characters: clean() it first.")
        row[1 : len(name) + 2] = torch.tensor([code_of[letter] for letter in name + "\n"])
    return codes


def next_letter_loss(model: Callable[[torch.Tensor], torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each letter from those before it.

    Args:
        model: A GPT, or what DDP or FSDP made of it.
        codes: (n, CONTEXT) from ``encode``, on the model's device.
    """
    logits = model(codes[:, :-1])  # (n, CONTEXT - 1, 32)
    return cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


@torch.no_grad()
def init_weights(model: GPT, device: torch.device | str) -> GPT:
    """Give a GPT on the device "meta" its memory and its first numbers; whole or sharded, they're the same.

    Each parameter has a seed of its own, so its numbers don't depend on who holds which shard of it.

    Returns:
        The same model, on ``device``.
    """
    model.to_empty(device=device)
    for seed, (name, weight) in enumerate(model.named_parameters()):
        if weight.dim() == 1:  # a LayerNorm's scale begins at 1, a bias at 0
            full = torch.full(weight.shape, float("norm" in name and name.endswith("weight")))
        else:
            full = 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        full = full.to(weight.device)
        if isinstance(weight, DTensor):  # each rank takes its shard, and nothing is sent
            full = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(full)
    return model
