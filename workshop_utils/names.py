"""Pet names as text that a small LSTM learns: tensors, the model, new names, and where names come from."""

import csv
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import torch
from torch import nn

from workshop_utils.storage import cache_folder, open_address, whole_file

LETTERS = "abcdefghijklmnopqrstuvwxyz -.'"
PADDING, STOP = 0, 1  # before a name's first character, after its last
CHARACTERS = ("", "\n", *LETTERS)  # of each code: padding, stop, and the letters
MAX_LENGTH, WIDTH = 24, 8  # characters of the longest name, and those before the next one that a model sees
NAME = re.compile(rf"(?=.*[a-z])[a-z .'-]{{1,{MAX_LENGTH}}}")


def clean(name: str) -> str | None:
    """Return a name in lower case, without accents and double spaces; None if it is too long or has odd characters.

    >>> clean("  Señor   Fluff "), clean("R2-D2")
    ('senor fluff', None)
    """
    letters = unicodedata.normalize("NFKD", name.replace("\u2019", "'").lower())
    name = " ".join("".join(letter for letter in letters if not unicodedata.combining(letter)).split())
    return name if NAME.fullmatch(name) else None


def split_names(names: Sequence[str], val_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Return (train, val), each name in one of them with all its pairs; `expand` after this. Order is kept."""
    in_val = np.random.default_rng(seed).permutation(len(names)) < round(val_fraction * len(names))
    return list(compress(names, ~in_val)), list(compress(names, in_val))


def expand(names: Sequence[str], width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (prefixes, targets): a pair for each character of each name, and one for its stop.

    prefixes: (n, width) int64 codes, the last `width` characters before the target, padded in front.
    targets: (n,) int64 codes. n is the number of characters plus one per name. Raises ValueError for other characters.
    """
    if odd := [name for name in names if not set(name) <= set(LETTERS)]:
        raise ValueError(f"{odd[0]!r} has characters other than {LETTERS!r}: clean() it first.")
    code_of = np.zeros(128, dtype=np.int64)  # PADDING, for the padding's own character 0
    code_of[[ord(letter) for letter in CHARACTERS[1:]]] = range(1, len(CHARACTERS))
    text = chr(0) + "".join(f"{chr(0) * width}{name}\n" for name in names)  # no prefix reaches into the name before
    codes = code_of[np.frombuffer(text.encode("ascii"), np.uint8)]  # one long array
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(codes, (width, 0)), width + 1)  # ends at each code
    pairs = torch.from_numpy(windows[codes != PADDING])  # (n, width + 1)
    return pairs[:, :-1].contiguous(), pairs[:, -1].contiguous()


class NameLSTM(nn.Module):
    """Says which character comes next: (n, width) codes -> (n, 32) logits; `dropout` acts in training mode only."""

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
    """Return `n` names of 1 to 24 characters, made up by `model`, all drawn together; leaves it in eval mode.

    temperature: below 1 the likely becomes likelier; 0 always takes the likeliest. Raises ValueError if negative.
    """
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature is {temperature}: give a number of at least 0; 1 draws as the model says.")
    device, generator = next(model.eval().parameters()).device, torch.Generator().manual_seed(seed)
    codes = torch.full((n, WIDTH), PADDING)
    for length in range(MAX_LENGTH):
        logits = model(codes[:, -WIDTH:].to(device)).double().cpu()  # (n, 32)
        logits[:, [PADDING] if length else [PADDING, STOP]] = -torch.inf
        likely = ((logits - logits.amax(1, keepdim=True)) / max(temperature, 1e-9)).softmax(1)
        codes = torch.cat([codes, likely.multinomial(1, generator=generator)], dim=1)
    texts = ("".join(CHARACTERS[code] for code in row) for row in codes[:, WIDTH:].tolist())
    return [" ".join(text.split("\n")[0].split()) for text in texts]


CITY = "https://data.seattle.gov/api/views/jguv-t9rb/rows.csv?accessType=DOWNLOAD"  # Seattle Pet Licenses, open data
COLUMN = "Animal's Name"
MIN_NAMES = 100  # fewer teach nothing
ANSWER_S = 60  # for the whole file; the city's has about 4 MB


class NamesError(RuntimeError):
    """A list of names cannot be had; the message says why and what to do."""


class PetNames(NamedTuple):
    """names: distinct str in lower case. kind: "custom" (WORKSHOP_NAMES), "city" or "project". origin: the address."""

    names: list[str]
    kind: str
    origin: str


def find_names() -> PetNames:
    """Return the PetNames of the first that applies: WORKSHOP_NAMES, the city's list if fetched, the project's own.

    WORKSHOP_NAMES: any fsspec address of a JSON list of names. What `clean` refuses is left out. Raises NamesError.
    """
    city, own = cache_folder() / "names.json", Path(__file__).with_name("names.txt")
    if url := os.environ.get("WORKSHOP_NAMES"):
        cure = "Point WORKSHOP_NAMES to a JSON list of names, or unset it to use the project's own."
        return PetNames(_names_at(url, json.loads, cure), "custom", url)
    if city.exists():
        cure = f"Run `workshop data names` again, or delete {city} to use the project's own."
        return PetNames(_names_at(str(city), json.loads, cure), "city", str(city))
    return PetNames(own.read_text(encoding="ascii").splitlines(), "project", str(own))


def fetch_names(source: str = CITY) -> Path:
    """Fetch the city's licence data, write its names into the cache, commonest first, and return that file's path.

    source: any fsspec address of a CSV with the column "Animal's Name". Raises NamesError.
    """
    names = _names_at(source, _from_csv, "Check the address and the network. The project's own list needs neither.")
    with whole_file(path := cache_folder() / "names.json") as part:
        part.write_text(json.dumps(names), encoding="ascii")
    return path


def _names_at(url, parse, cure):
    limit = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=ANSWER_S)}} if url.startswith("http") else None
    try:
        fs, path = open_address(url, limit)
        listed = parse(fs.cat_file(path).decode("utf-8-sig"))
        if not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
            raise ValueError("it is no list of strings")
        if len(names := [name for name in dict.fromkeys(map(clean, listed)) if name]) < MIN_NAMES:
            raise ValueError(f"it holds {len(names)} usable names, and {MIN_NAMES} are needed")
        return names
    except Exception as error:  # each filesystem has its own
        raise NamesError(f"No names from {url}: {str(error) or f'not all came within {ANSWER_S} s'}. {cure}") from error


def _from_csv(text):
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    if not rows or COLUMN not in rows[0]:
        raise ValueError(f"it has no column {COLUMN!r}; it begins with {text[:60]!r}")
    if None in rows[-1].values():
        raise ValueError(f"it is cut off in row {len(rows) + 1:,}")
    return [name for name, _ in Counter(clean(row[COLUMN]) for row in rows).most_common() if name]
