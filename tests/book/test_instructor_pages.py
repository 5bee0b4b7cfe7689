"""The instructor's pages: numbers come from stored runs, and a printed handout is one page."""

import json
import re

import pytest
from built import ROOT

NOTEBOOKS = sorted((ROOT / "notebook_output").glob("[0-9]*.ipynb"))
GUIDE = (ROOT / "docs/instructor/notebooks.md").read_text(encoding="utf-8")
MEASURED = re.compile(r"(?<![\w.])\d[\d.,]* ?(?:ms|s|seconds|MB|MiB|GB|images/s|%)(?!\w)")


@pytest.fixture
def stored(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    from book import stored

    return stored


def part_on(number):
    return GUIDE.partition(f"\n## {number} ·")[2].partition("\n## ")[0]


def write_notebook(folder, text):
    (folder / "notebook_output").mkdir()
    cell = {"cell_type": "code", "source": ["reconcile(my_guess_s, 1, 2, 's')"], "outputs": [{"text": text}]}
    (folder / "notebook_output/03-x.ipynb").write_text(json.dumps({"cells": [cell]}))


def test_each_guess_in_the_guide_has_the_estimate_and_the_measurement_of_its_notebook(pages, stored):
    shown = pages["docs/instructor/notebooks.html"].text
    for path in NOTEBOOKS:
        number = path.name[:2]
        roles = re.findall(r"\{stored\}`(\d\d) (\w+)` \|$", part_on(number), re.MULTILINE)
        cells = json.loads(path.read_text())["cells"]
        guessed = re.findall(r"^(my_guess\w*) = None", "\n".join("".join(cell["source"]) for cell in cells), re.M)
        assert roles == [(number, name) for name in guessed[: len(roles)]] and roles, "in the order of the notebook"
        for _, name in roles:
            found = stored.read_stored(ROOT, number, name)
            assert f"{found.estimate} → {found.measured} {found.unit}" in shown


def test_the_printed_lines_are_read_with_their_unit(stored, tmp_path):
    write_notebook(
        tmp_path, "pat\nsimple estimate    1,796 different s\nmeasured             942 different s   0.52 times\n"
    )
    found = stored.read_stored(tmp_path, "03", "my_guess_s")
    assert found[1:] == ("1,796", "942", "different s")


@pytest.mark.parametrize(
    "number, name, said",
    [
        ("99", "my_guess_s", "no notebook '99'"),
        ("03", "my_guess_ms", "03-x.ipynb .* my_guess_ms.*render.py 03"),
        ("03", "my_guess_s", "03-x.ipynb .* my_guess_s.*render.py 03"),
    ],
)
def test_a_number_that_no_run_has_stored_is_named(stored, tmp_path, number, name, said):
    write_notebook(tmp_path, "nothing of the kind\n")
    with pytest.raises(LookupError, match=said):
        stored.read_stored(tmp_path, number, name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nobody_types_a_measured_number_into_the_guide(path):
    source = json.loads((ROOT / "notebooks" / path.name).read_text())["cells"]  # without outputs
    said = "\n".join("".join(cell["source"]) for cell in source)
    code = ROOT / "workshop_utils/exercises" / (path.stem[3:].replace("-", "_") + ".py")
    typed = set(MEASURED.findall(part_on(path.name[:2])))
    assert {n for n in typed if n not in said and n not in code.read_text()} == set()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_commands_worth_remembering_occur_in_their_notebook(path):
    said = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    (line,) = re.findall(r"^- \*\*Worth remembering\.\*\* (.+)$", part_on(path.name[:2]), re.MULTILINE)
    codes = re.findall("`([^`]+)`", line)
    assert 4 <= len(codes) <= 12
    for code in codes:
        for name in re.findall(r"\w+(?=\()", code) or re.findall(r"^[\w-]+", code):
            assert re.search(rf"\b{re.escape(name)}\b", said), code


def test_a_printed_handout_is_one_page_of_a4_for_each_notebook(site, browser):
    page = browser.new_page()
    page.goto(f"{site}/docs/instructor/handouts.html")
    assert page.locator(".handout").count() == len(NOTEBOOKS)
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == len(NOTEBOOKS)
    boxes = {tuple(round(float(n)) for n in box.split()[2:]) for box in re.findall(rb"/MediaBox\s*\[([^\]]+)\]", pdf)}
    assert all(abs(width - 595) <= 1 and abs(height - 842) <= 1 for width, height in boxes), boxes

    page.emulate_media(media="print")
    page.set_viewport_size({"width": 673, "height": 1020})  # A4 without its margins, in CSS pixels
    hidden = page.locator(".handout").evaluate_all(
        "sheets => sheets.filter(it => it.scrollHeight > it.clientHeight + 1).map(it => it.innerText.split('\\n')[0])"
    )
    assert hidden == [], "a sheet has more text than its page shows"
    page.close()
