"""Pet names: found, turned into tensors, learned and made up."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from workshop_utils import pet_names as names
from workshop_utils.pet_names import CHARACTERS, NameLSTM, NamesError, clean, expand, find_names, generate

MANY = [f"{first} {second}" for first in ("max", "mr.", "anne-marie", "o'hara") for second in names.LETTERS[:26]]


def test_the_project_has_a_list_of_its_own():
    found = find_names()
    assert found.kind == "project" and found.origin.endswith("names.txt")
    assert len(found.names) >= 800
    assert len(set(found.names)) == len(found.names)
    assert [clean(name) for name in found.names] == found.names


@pytest.mark.parametrize("fraction", [0, 1, 2.0, -0.1, float("nan")])
def test_a_part_for_validation_is_between_none_and_all(fraction):
    with pytest.raises(ValueError, match=f"val_fraction is {fraction}"):
        names.split_names(MANY, fraction, 0)


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
        (json.dumps(["max"] * 500), "1 usable names"),
    ],
)
def test_a_list_that_cannot_be_used_is_named_with_the_cure(tmp_path, monkeypatch, content, reason):
    path = tmp_path / "mine.json"
    if content:
        path.write_text(content)
    monkeypatch.setenv("WORKSHOP_NAMES", str(path))
    with pytest.raises(NamesError, match=f"{path}.*{reason}.*unset it"):
        find_names()


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


@pytest.mark.parametrize("width", [1, 10, 40])
def test_names_are_expanded_as_by_hand(width):
    for name_list in (find_names().names, ["a"], [".'-", "a a"], ["", "a", ""], MANY[:1] * 2):
        prefixes, targets = expand(name_list, width)
        by_hand = expanded_by_hand(name_list, width)
        assert prefixes.dtype == targets.dtype == torch.int64
        assert torch.equal(prefixes, by_hand[0]) and torch.equal(targets, by_hand[1])


@pytest.mark.parametrize("odd", ["Max", "zoë"])
def test_characters_without_a_code_are_refused_by_name(odd):
    with pytest.raises(ValueError, match=f"'{odd}'"):
        expand(["max", odd])


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


def test_names_are_made_up_without_dropout_whatever_mode_the_model_is_in():
    model = NameLSTM(hidden=8, dropout=0.5).train()
    assert generate(model, 20) == generate(model.eval(), 20)


@pytest.mark.parametrize(("stops", "length"), [(-1e9, 24), (1e9, 1)])
def test_no_made_up_name_is_endless_or_empty(stops, length):
    model = NameLSTM(hidden=8)
    with torch.no_grad():
        model.head.bias[names.STOP] = stops
    assert [len(name) for name in generate(model, 2, temperature=1e-9)] == [length, length]


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_below_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        generate(NameLSTM(hidden=8), 1, temperature=temperature)
