"""Pet names as text that a small LSTM learns: tensors, the model, new names, and where names come from."""

import csv
import io
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch
from torch import nn

from workshop_utils.storage import cache_folder, default_storage_options, open_address, whole_file

LETTERS = "abcdefghijklmnopqrstuvwxyz -.'"
PADDING, STOP = 0, 1  # before a name's first character, after its last
CHARACTERS = ("", "\n", *LETTERS)  # of each code: padding, stop, and the letters
MAX_LENGTH = 24
NAME = re.compile(rf"(?=.*[a-z])[a-z .'-]{{1,{MAX_LENGTH}}}")
WIDTH = 8  # how many characters before the next one a model sees


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
    pairs = list(zip(names, in_val, strict=True))
    return [name for name, val in pairs if not val], [name for name, val in pairs if val]


def expand(names: Sequence[str], width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (prefixes, targets): a pair for each character of each name, and one for its stop.

    prefixes: (n, width) int64 codes, the last `width` characters before the target, padded in front.
    targets: (n,) int64 codes. n is the number of characters plus one per name. Raises ValueError for other characters.
    """
    code_of = {letter: code for code, letter in enumerate(CHARACTERS)}
    prefixes, targets = [], []
    for name in names:
        if not set(name) <= set(LETTERS):
            raise ValueError(f"{name!r} has characters other than {LETTERS!r}: clean() it first.")
        codes = [PADDING] * width + [code_of[letter] for letter in name] + [STOP]
        for end in range(width, len(codes)):
            prefixes.append(codes[end - width : end])
            targets.append(codes[end])
    return torch.tensor(prefixes, dtype=torch.int64).reshape(-1, width), torch.tensor(targets, dtype=torch.int64)


class NameLSTM(nn.Module):
    """Says which character comes next: (n, width) codes -> (n, 32) logits."""

    def __init__(self, hidden: int = 128, n_layers: int = 4, embedding: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, n_layers, batch_first=True)
        self.head = nn.Linear(hidden, len(CHARACTERS))

    def forward(self, prefixes: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(prefixes))  # (n, width, hidden)
        return self.head(outputs[:, -1])


@torch.inference_mode()
def generate(model: nn.Module, n: int, *, temperature: float = 1.0, seed: int = 0,
             max_length: int = MAX_LENGTH, width: int = WIDTH) -> list[str]:  # fmt: skip
    """Return `n` names of 1 to `max_length` characters, made up by `model`, all drawn together.

    temperature: below 1 the likely becomes likelier; 0 always takes the likeliest. Raises ValueError if negative.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: give a number of at least 0; 1 draws as the model says.")
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    codes = torch.full((n, width), PADDING)
    for length in range(max_length):
        logits = model(codes[:, -width:].to(device)).double().cpu()  # (n, 32)
        logits[:, [PADDING] if length else [PADDING, STOP]] = -math.inf
        if temperature:
            likely = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
            drawn = likely.multinomial(1, generator=generator)
        else:
            drawn = logits.argmax(1, keepdim=True)
        codes = torch.cat([codes, drawn], dim=1)
    texts = ("".join(CHARACTERS[code] for code in row) for row in codes[:, width:].tolist())
    return [" ".join(text.split("\n")[0].split()) for text in texts]


CITY = "https://data.seattle.gov/api/views/jguv-t9rb/rows.csv?accessType=DOWNLOAD"  # Seattle Pet Licenses, open data
COLUMN = "Animal's Name"
MIN_NAMES = 100  # fewer teach nothing
MAX_BYTES = 50_000_000  # the city's file has about 4 MB
ANSWER_S = 60  # for the whole file


class NamesError(RuntimeError):
    """A list of names cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class PetNames:
    """names: distinct str in lower case. kind: "custom" (WORKSHOP_NAMES), "city" or "project". origin: the address."""

    names: list[str]
    kind: str
    origin: str


def find_names() -> PetNames:
    """Return the PetNames of the first that applies: WORKSHOP_NAMES, the city's list if fetched, the project's own.

    WORKSHOP_NAMES: any fsspec address of a JSON list of names. What `clean` refuses is left out. Raises NamesError.
    """
    if url := os.environ.get("WORKSHOP_NAMES"):
        cure = "Point WORKSHOP_NAMES to a JSON list of names, or unset it to use the project's own."
        return PetNames(_names_at(url, _from_json, cure), "custom", url)
    if (city := cache_folder() / "names.json").exists():
        cure = f"Run `workshop data names` again, or delete {city} to use the project's own."
        return PetNames(_names_at(str(city), _from_json, cure), "city", str(city))
    own = Path(__file__).with_name("names.txt")
    return PetNames(own.read_text(encoding="ascii").splitlines(), "project", str(own))


def fetch_names(source: str = CITY) -> Path:
    """Fetch the city's licence data, write its names into the cache, commonest first, and return that file's path.

    source: any fsspec address of a CSV with the column "Animal's Name". Raises NamesError.
    """
    cure = "Check the address and the network. The project's own list of names needs neither."
    names = _names_at(source, _from_csv, cure)
    with whole_file(path := cache_folder() / "names.json") as part:
        part.write_text(json.dumps(names), encoding="ascii")
    return path


def _names_at(url, parse, cure):
    try:
        names = [name for name in dict.fromkeys(map(clean, parse(_read(url)))) if name]
        if len(names) < MIN_NAMES:
            raise ValueError(f"it holds {len(names)} usable names, and {MIN_NAMES} are needed")
        return names
    except Exception as error:  # each filesystem has its own
        raise NamesError(f"No names from {url}: {error or type(error).__name__}. {cure}") from error


def _from_json(content):
    names = json.loads(content)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("it is no list of strings")
    return names


def _from_csv(content):
    header, *rows = list(csv.reader(io.StringIO(content.decode("utf-8-sig")), strict=True)) or [[]]
    if COLUMN not in header:
        raise ValueError(f"it has no column {COLUMN!r}; it begins with {','.join(header)[:60]!r}")
    if cut := [number for number, row in enumerate(rows, start=2) if len(row) != len(header)]:
        raise ValueError(f"it is cut off in row {cut[0]:,}")
    counts = Counter(clean(row[header.index(COLUMN)]) for row in rows)
    return [name for name, _ in counts.most_common() if name]


def _read(url):
    options, content = default_storage_options(url), b""
    if url.startswith("http"):
        options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=ANSWER_S)}}
    fs, path = open_address(url, options)
    try:
        with fs.open(path, "rb") as file:
            while len(content) <= MAX_BYTES and (chunk := file.read(2**20)):
                content += chunk
    except TimeoutError as error:
        raise TimeoutError(f"{len(content):,} bytes came within {ANSWER_S} s") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES:,} bytes")
    return content
