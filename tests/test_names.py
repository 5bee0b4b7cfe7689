"""Pet names: found, fetched, turned into tensors, learned and made up."""

import json
import os
import threading
import time
import unicodedata
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from workshop_utils import names
from workshop_utils.names import CHARACTERS, NameLSTM, NamesError, clean, expand, fetch_names, find_names, generate
from workshop_utils.storage import cache_folder

MANY = [f"{first} {second}" for first in ("max", "mr.", "anne-marie", "o'hara") for second in names.LETTERS[:26]]
SHARED = Path(__file__).parents[2] / "shared/data/pet-names/seattle_pet_names.json"
HEADER = "License Issue Date,License Number,Animal's Name,Species\n"


def csv_of(pets):
    return (HEADER + "".join(f'December 18 2015,S107948,"{pet}",Dog\n' for pet in pets)).encode()


@pytest.fixture(autouse=True)
def no_names_of_the_users(monkeypatch):
    monkeypatch.delenv("WORKSHOP_NAMES", raising=False)


@pytest.fixture
def serve():
    """Return a function that serves bytes over HTTP and returns the address; hangs: seconds before the second half."""
    servers = []

    def start(content, hangs=0, cut=False, endless=False):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):  # noqa: N802
                self.send_response(200)
                self.end_headers()

            def do_GET(self):  # noqa: N802
                self.send_response(200)
                if cut:
                    self.send_header("Content-Length", str(2 * len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                with suppress(OSError):  # nobody listens any more
                    time.sleep(hangs)
                    self.wfile.write(content[len(content) // 2 :])
                    while endless:
                        self.wfile.write(b"December 18 2015,S107948,Max,Dog\n")
                        time.sleep(0.01)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/rows.csv?accessType=DOWNLOAD"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_without_a_network_the_project_has_a_list_of_its_own():
    found = find_names()
    assert found.kind == "project" and found.origin.endswith("names.txt")
    assert len(found.names) >= 800
    assert len(set(found.names)) == len(found.names)
    assert [clean(name) for name in found.names] == found.names


def test_any_json_list_can_be_named(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(["Zoë", "ZOE", "R2-D2", "Señor  Fluff", "x" * 30, "...", *MANY, "Max a"]))
    monkeypatch.setenv("WORKSHOP_NAMES", f"file://{path}")
    assert find_names() == names.PetNames(["zoe", "senor fluff", *MANY], "custom", f"file://{path}")


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "No such file"),
        ("{not json", "Expecting"),
        ('{"max": 3}', "no list of strings"),
        (json.dumps([*MANY, 7]), "no list of strings"),
        (json.dumps(["max"] * 500), "1 usable names"),
    ],
)
def test_a_list_that_cannot_be_used_is_named_with_the_cure(tmp_path, monkeypatch, content, reason):
    path = tmp_path / "mine.json"
    if content:
        path.write_text(content)
    monkeypatch.setenv("WORKSHOP_NAMES", str(path))
    with pytest.raises(NamesError) as error:
        find_names()
    assert reason in str(error.value) and str(path) in str(error.value) and "unset it" in str(error.value)


def test_fetched_names_are_used_from_then_on_the_commonest_first(serve):
    path = fetch_names(serve(csv_of([*MANY, "Zuzu", "Bella", "BELLA", "ZuZu", "", "bella"])))
    assert find_names() == names.PetNames(["bella", "zuzu", *MANY], "city", str(path))
    assert os.listdir(cache_folder()) == ["names.json"]


def test_the_environment_wins_over_what_was_fetched(serve, tmp_path, monkeypatch):
    fetch_names(serve(csv_of(MANY)))
    (tmp_path / "mine.json").write_text(json.dumps(MANY[::-1]))
    monkeypatch.setenv("WORKSHOP_NAMES", str(tmp_path / "mine.json"))
    assert find_names().names == MANY[::-1]


def test_a_damaged_cache_says_how_to_mend_it():
    cache_folder().mkdir(parents=True)
    (cache_folder() / "names.json").write_text("[")
    with pytest.raises(NamesError, match="workshop data names"):
        find_names()


def test_a_failed_fetch_says_why_and_keeps_what_was_there(serve):
    path = fetch_names(serve(csv_of(MANY)))
    before = path.read_bytes()
    for source, reason in [
        (serve(b"<html>moved</html>"), "no column"),
        (serve(b""), "no column"),
        (serve(csv_of(MANY[:5])), "5 usable names"),
        (serve(csv_of(MANY)[:-8]), "unexpected end"),
        (serve(csv_of(MANY)[:-5]), "cut off in row 105"),
        (serve(csv_of(MANY), cut=True), "payload|Content"),
        ("http://127.0.0.1:9/rows.csv", "127.0.0.1"),
    ]:
        with pytest.raises(NamesError, match=reason) as error:
            fetch_names(source)
        assert source in str(error.value) and "project's own list" in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["silent", "endless"])
def test_a_source_that_falls_silent_or_never_ends_is_given_up(serve, monkeypatch, kind):
    monkeypatch.setattr(names, "ANSWER_S", 1)
    with pytest.raises(NamesError, match="within 1 s"):
        fetch_names(serve(csv_of(MANY), **({"hangs": 30} if kind == "silent" else {"endless": True})))


def expanded_by_hand(name_list, width):
    """The same as `expand`, one name and one character at a time."""
    prefixes, targets = [], []
    for name in name_list:
        codes = [CHARACTERS.index(letter) for letter in name]
        for position, target in enumerate([*codes, names.STOP]):
            before = codes[max(0, position - width) : position]
            prefixes.append([names.PADDING] * (width - len(before)) + before)
            targets.append(target)
    return torch.tensor(prefixes).reshape(-1, width), torch.tensor(targets)


@pytest.mark.parametrize("width", [1, 3, 10, 40])
def test_names_are_expanded_as_by_hand(width):
    for name_list in (find_names().names, ["a"], [".'-", "a a"], ["", "a", ""], MANY[:1] * 2):
        prefixes, targets = expand(name_list, width)
        by_hand = expanded_by_hand(name_list, width)
        assert prefixes.dtype == targets.dtype == torch.int64
        assert torch.equal(prefixes, by_hand[0]) and torch.equal(targets, by_hand[1])


def test_no_names_expand_to_nothing():
    prefixes, targets = expand([], 5)
    assert prefixes.shape == (0, 5) and targets.shape == (0,)


@pytest.mark.parametrize("odd", ["Max", "a\nb", "zoë", "7", "a\x00", "名"])
def test_characters_without_a_code_are_refused_by_name(odd):
    with pytest.raises(ValueError) as error:
        expand(["max", odd])
    assert repr(odd) in str(error.value)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/pet-names")
def test_the_citys_names_are_found_and_expanded_as_by_hand(monkeypatch):
    monkeypatch.setenv("WORKSHOP_NAMES", str(SHARED))
    found = find_names().names
    listed = json.loads(SHARED.read_text())
    assert len(found) > 0.99 * len(listed) and found[:3] == listed[:3]
    assert torch.equal(expand(found, 4)[0], expanded_by_hand(found, 4)[0])


def test_clean_keeps_accents_off_and_letters_on():
    assert clean("Ångström’s Pup") == "angstrom's pup"
    assert not any(unicodedata.combining(letter) for letter in clean("Zoë"))
    for odd in ("", "  ", "7", "-", "名", "x" * 25, "a\x00b"):
        assert clean(odd) is None, odd


def test_a_name_is_in_training_or_in_validation():
    train, val = names.split_names(MANY, 0.25, seed=1)
    assert len(val) == 26 and set(train) | set(val) == set(MANY) and not set(train) & set(val)
    assert train == [name for name in MANY if name in set(train)]
    assert names.split_names(MANY, 0.25, seed=1) == (train, val) != names.split_names(MANY, 0.25, seed=2)


def test_a_model_learns_a_name_by_heart():
    torch.manual_seed(0)
    model = NameLSTM(hidden=32)
    prefixes, targets = expand(["anne-marie"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        logits = model(prefixes)
        optimizer.zero_grad()
        cross_entropy(logits, targets).backward()
        optimizer.step()
    assert logits.shape == (len(targets), len(CHARACTERS))
    assert generate(model, 3, temperature=0) == ["anne-marie"] * 3
    assert set(generate(model, 20, temperature=0.1)) == {"anne-marie"}


def test_dropout_acts_in_training_and_not_in_evaluation():
    prefixes, _ = expand(["anne-marie"])
    for dropout, differs in [(0.5, True), (0.0, False)]:
        model = NameLSTM(hidden=8, dropout=dropout)
        assert torch.equal(model(prefixes), model(prefixes)) != differs
        model.eval()
        assert torch.equal(model(prefixes), model(prefixes))


def test_names_are_made_up_without_dropout_whatever_mode_the_model_is_in():
    model = NameLSTM(hidden=8, dropout=0.5).train()
    assert generate(model, 20) == generate(model.eval(), 20)


def test_an_untrained_model_makes_short_names_of_letters():
    torch.manual_seed(0)
    model = NameLSTM(hidden=8)
    made = generate(model, 50)
    assert len(made) == 50 and max(map(len, made)) <= 24
    assert set("".join(made)) <= set(names.LETTERS)
    assert made == generate(model, 50) != generate(model, 50, seed=1)
    assert len(set(made)) > 40
    assert generate(model, 0) == []


def test_a_model_that_never_stops_is_stopped():
    model = NameLSTM(hidden=8)
    with torch.no_grad():
        model.head.bias[names.STOP] = -1e9
    assert [len(name) for name in generate(model, 2, temperature=0)] == [24, 24]


def test_no_made_up_name_is_empty():
    model = NameLSTM(hidden=8)
    with torch.no_grad():
        model.head.bias[names.STOP] = 1e9
    assert [len(name) for name in generate(model, 2, temperature=1e-9)] == [1, 1]


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_below_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        generate(NameLSTM(hidden=8), 1, temperature=temperature)
