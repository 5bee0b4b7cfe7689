"""What every notebook has, and that its rendered twin was made from it."""

import re

import pytest
from lessons import APPENDICES, DEEP_DIVES, SOURCES, code_cells, prose, read, rendered_twin, says, tags, without_bars

pytestmark = pytest.mark.parametrize("path", [*SOURCES, *DEEP_DIVES], ids=lambda path: path.stem)


def test_the_source_stores_no_outputs(path):
    for cell in code_cells(read(path)):
        assert not cell.outputs and cell.execution_count is None


def test_the_rendered_twin_was_made_from_this_source(path):
    def content(notebook):
        return [(cell.cell_type, cell.source, sorted(tags(cell))) for cell in notebook.cells]

    assert content(read(rendered_twin(path))) == content(read(path)), "run `make run` and commit notebook_output/"


def test_the_rendered_twin_names_no_path_of_the_machine_that_made_it(path):
    text = (rendered_twin(path)).read_text()
    assert not re.search(r"/(home|root|Users|tmp|work)/", text)


def test_at_least_half_of_the_cells_that_say_something_are_compared(path):
    saying = [cell for cell in code_cells(without_bars(read(rendered_twin(path)))) if says(cell)]
    compared = [cell for cell in saying if not tags(cell) & {"nbval-ignore-output", "nbval-skip"}]
    assert len(compared) >= len(saying) / 2, f"{len(compared)} of {len(saying)}"


def test_every_cell_that_is_not_compared_says_why(path):
    for cell in code_cells(read(path)):
        skips = tags(cell) & {"nbval-ignore-output", "nbval-skip", "raises-exception"}
        assert skips <= {"nbval-ignore-output"}
        assert bool(skips) == bool(cell.metadata.get("reason")), cell.source


def test_it_says_who_it_is_for_and_what_comes_after(path):
    text = prose(read(path))
    for part in ("you can**", "**Required:**", "**Helpful:**", "**Time:**", "## Key points"):
        assert part in text, part
    assert "**Next:**" in text or path == SOURCES[-1] or path in DEEP_DIVES


def test_it_ends_with_two_or_three_links_to_documentation(path):
    end = prose(read(path)).split("## Key points")[1]
    assert 2 <= len(re.findall(r"\]\(https://", end)) <= 3


def test_the_attendee_commits_to_numbers_before_they_are_measured(path):
    cells = code_cells(read(path))
    guesses = [cell for cell in cells if "guess" in tags(cell)]
    assert 1 <= len(guesses) <= 2
    assert all(re.search(r"^\w+ = None", cell.source, flags=re.MULTILINE) for cell in guesses), "so that all runs"
    for guess in guesses:
        name = re.search(r"^(\w+) = None", guess.source, flags=re.MULTILINE).group(1)
        after = cells[cells.index(guess) + 1 :]
        assert any(f"reconcile({name}" in cell.source for cell in after), f"{name} is set beside no measurement"


def test_it_fits_into_a_lesson(path):
    minutes, unit = re.search(r"\*\*Time:\*\* (\d+) (minutes in class)", prose(read(path))).groups()
    longest = 20 if path.name in APPENDICES else 25 if path in DEEP_DIVES else 60
    assert int(minutes) <= longest, "move a section to '## Going further' at the end"


def test_it_has_parameters_and_exercises_of_four_cells(path):
    cells = read(path).cells
    assert [cell for cell in cells if "parameters" in tags(cell)]
    kinds = [next(iter(tags(cell) & {"exercise", "solution", "check"}), None) for cell in cells]
    stubs = [position for position, kind in enumerate(kinds) if kind == "exercise"]
    assert 1 <= len(stubs) <= 2
    for position in stubs:
        assert cells[position - 1].cell_type == "markdown"
        hints = re.findall(r"<details><summary>(Hint.*?)</summary>", cells[position - 1].source)
        assert hints == ["Hint 1: a nudge", "Hint 2: the API", "Hint 3: the code"]
        assert kinds[position + 1 : position + 3] == ["solution", "check"]
        assert cells[position + 1].metadata["jupyter"]["source_hidden"]


def test_its_lesson_is_short_enough_for_a_class(path):
    cells = read(path).cells
    end = next(index for index, cell in enumerate(cells) if "## Key points" in cell.source)
    lesson = [cell for cell in cells[:end] if not tags(cell) & {"solution", "check"}]
    code = [line for cell in lesson if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert len(lesson) <= (20 if path in DEEP_DIVES else 30)
    assert len([line for line in code if line.strip() and not line.strip().startswith("#")]) <= 160


def test_its_cells_are_short_enough_to_hold_in_mind(path):
    for cell in code_cells(read(path)):
        assert len(cell.source.splitlines()) <= 40


def test_its_pictures_have_alt_text(path):
    for cell in read(rendered_twin(path)).cells:
        assert not re.search(r"!\[\s*\]\(", cell.source)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                assert len(output.metadata["image/png"]["alt"]) > 20, cell.source
