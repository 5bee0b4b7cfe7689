"""Pet names as text that a small LSTM learns: tensors, the model, new names, and where names come from."""

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from workshop_utils.arguments import fraction
from workshop_utils.storage import open_address, variables

LETTERS = "abcdefghijklmnopqrstuvwxyz -.'"
PADDING, STOP = 0, 1  # before a name's first character, after its last
CHARACTERS = ("", "\n", *LETTERS)  # the position of a character is its code: padding, stop, and the letters
SPACE = CHARACTERS.index(" ")
MAX_LENGTH, WIDTH = 24, 8  # characters of the longest name; characters that a model sees before the next one
MIN_NAMES = 100  # fewer teach a model nothing
NAME = re.compile(rf"(?=.*[a-z])[a-z .'-]{{1,{MAX_LENGTH}}}")


def clean(name: str) -> str | None:
    """Return a name in lower case, without accents or double spaces; None if it is too long or has odd characters.

    >>> clean("  Señor   Fluff "), clean("R2-D2")
    ('senor fluff', None)
    """
    letters = unicodedata.normalize("NFKD", name.replace("\u2019", "'").lower())
    name = " ".join("".join(letter for letter in letters if not unicodedata.combining(letter)).split())
    return name if NAME.fullmatch(name) else None


def split_names(names: Sequence[str], val_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Return (train, val): each name is in one of them, in the order given. Call this before `expand`.

    A name's pairs would be on both sides otherwise.
    Raises ValueError unless 0 < val_fraction < 1.
    """
    val_fraction = fraction("val_fraction", val_fraction)
    in_val = np.random.default_rng(seed).permutation(len(names)) < round(val_fraction * len(names))
    return list(compress(names, ~in_val)), list(compress(names, in_val))


def expand(names: Sequence[str], width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (prefixes, targets): a pair for each character of each name, and one for the stop after it.

    prefixes: (n, width) int64 codes, the last `width` characters before the target, padded in front.
    targets: (n,) int64 codes. n is the number of characters plus one per name. Raises ValueError for other characters.
    """
    if odd := [name for name in names if not set(name) <= set(LETTERS)]:
        raise ValueError(f"{odd[0]!r} has characters other than {LETTERS!r}: clean() it first.")
    code_of = np.zeros(128, dtype=np.int64)  # character 0 becomes PADDING, which is 0
    code_of[[ord(letter) for letter in CHARACTERS[1:]]] = range(1, len(CHARACTERS))
    # The padding is as wide as a prefix, so no prefix reaches into the name before.
    text = chr(0) + "".join(f"{chr(0) * width}{name}\n" for name in names)
    codes = code_of[np.frombuffer(text.encode("ascii"), np.uint8)]  # one long array
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(codes, (width, 0)), width + 1)  # ends at each code
    pairs = torch.from_numpy(windows[codes != PADDING])  # (n, width + 1)
    return pairs[:, :-1].contiguous(), pairs[:, -1].contiguous()


def ngram_loss(train_names: Sequence[str], val_names: Sequence[str], n: int, *, discount: float = 0.9) -> float:
    """Return the validation loss of n-gram tables with interpolated Kneser-Ney smoothing.

    The longest table counts how often each character follows n - 1 others in the training names. Each shorter one
    counts the different longer contexts instead. A table takes `discount` off each count, and shares that out in
    proportion to the next shorter table.

    Returns:
        The mean of -log(probability of the right character), in nats, as `cross_entropy` returns it.
    """
    prefixes, targets = (codes.tolist() for codes in expand(train_names))
    counts = Counter((tuple(prefix[WIDTH - n + 1 :]), target) for prefix, target in zip(prefixes, targets, strict=True))
    tables = []
    for _ in range(n):
        totals: Counter = Counter()
        kinds: Counter = Counter()  # different characters that follow
        for (context, _target), count in counts.items():
            totals[context] += count
            kinds[context] += 1
        tables.append((counts, totals, kinds))
        counts = Counter((context[1:], target) for context, target in counts)
    losses = []
    prefixes, targets = (codes.tolist() for codes in expand(val_names))
    for prefix, target in zip(prefixes, targets, strict=True):
        likely = 1 / (len(CHARACTERS) - 1)  # a blind guess; padding never follows
        for length, (counts, totals, kinds) in enumerate(reversed(tables)):  # the shortest context first
            context = tuple(prefix[WIDTH - length :])
            if totals[context]:
                left = max(counts[context, target] - discount, 0)
                likely = (left + discount * kinds[context] * likely) / totals[context]
        losses.append(-math.log(likely))
    return sum(losses) / len(losses)


class NameLSTM(nn.Module):
    """A model of the next character: (n, width) codes -> (n, 32) logits. `dropout` acts in training mode only."""

    def __init__(self, hidden: int = 64, embedding: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, len(CHARACTERS))

    def forward(self, prefixes: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.dropout(self.embedding(prefixes)))  # (n, width, hidden)
        return self.head(self.dropout(outputs[:, -1]))


@torch.inference_mode()
def generate(model: nn.Module, n: int, *, temperature: float = 1.0, seed: int = 0) -> list[str]:
    """Return `n` names of 1 to 24 characters that `model` makes up; the model is in eval mode afterwards.

    temperature: below 1, likely characters become likelier; 0 takes the likeliest.
    Raises ValueError for a negative temperature.
    """
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature is {temperature}: give a number of at least 0; 1 draws as the model says.")
    device, generator = next(model.eval().parameters()).device, torch.Generator().manual_seed(seed)
    codes = torch.full((n, WIDTH), PADDING)
    for length in range(MAX_LENGTH):
        logits = model(codes[:, -WIDTH:].to(device)).double().cpu()  # (n, 32)
        logits[:, [PADDING] if length else [PADDING, STOP, SPACE]] = -torch.inf
        likely = ((logits - logits.amax(1, keepdim=True)) / max(temperature, 1e-9)).softmax(1)
        codes = torch.cat([codes, likely.multinomial(1, generator=generator)], dim=1)
    texts = ("".join(CHARACTERS[code] for code in row) for row in codes[:, WIDTH:].tolist())
    return [" ".join(text.split("\n")[0].split()) for text in texts]


class NamesError(RuntimeError):
    """A list of names cannot be used; the message says why and what to do."""


class PetNames(NamedTuple):
    """names: distinct str in lower case. kind: "custom" (WORKSHOP_NAMES) or "project". origin: the address."""

    names: list[str]
    kind: str
    origin: str


def find_names() -> PetNames:
    """Return the names at WORKSHOP_NAMES, the address of a JSON list of names, else the project's own.

    Names that `clean` refuses are left out. Raises NamesError.
    """
    if not (url := variables().names):
        own = Path(__file__).with_name("pet_names.txt")
        return PetNames(own.read_text(encoding="ascii").splitlines(), "project", str(own))
    try:
        fs, path = open_address(url)
        listed = json.loads(fs.cat_file(path).decode("utf-8-sig"))
        if not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
            raise ValueError("it is no list of strings")
        names = [name for name in dict.fromkeys(map(clean, listed)) if name]
        if len(names) < MIN_NAMES:
            raise ValueError(f"it holds {len(names)} usable names, and {MIN_NAMES} are needed")
    except Exception as error:  # each filesystem has its own
        cure = "Point WORKSHOP_NAMES to a JSON list of names, or unset it to use the project's own."
        raise NamesError(f"No names from {url}: {error}. {cure}") from error
    return PetNames(names, "custom", url)
