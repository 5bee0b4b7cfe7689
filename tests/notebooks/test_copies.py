"""The copies that nbval runs hold each check twice, after the stub and after the solution, or each cell twice."""

import pytest
from copies import FAILED_AS_IT_SHOULD, with_every_cell_twice, with_stub_checks
from lessons import SOURCES, code_cells, read, tags, without_bars
from nbformat.v4 import new_code_cell, new_notebook, new_output

NOTEBOOK = next(path for path in SOURCES if path.stem.startswith("01"))


def test_each_stub_is_followed_by_a_check_that_has_to_fail():
    cells = with_stub_checks(read(NOTEBOOK)).cells
    stubs = [position for position, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert len(stubs) >= 2
    for position in stubs:
        expecting, solution, check = cells[position + 1 : position + 4]
        assert "solution" in tags(solution) and "check" in tags(check)
        assert check.source.strip() in expecting.source.replace("\n    ", "\n")
        assert expecting.outputs[0].text == FAILED_AS_IT_SHOULD


def test_only_a_hint_makes_that_cell_print_what_is_expected(capsys):
    def run(check):
        cell = code_cells(read(NOTEBOOK))[0]
        cell.source = check
        notebook = read(NOTEBOOK)
        solution = next(one for one in notebook.cells if "solution" in tags(one))
        notebook.cells = [solution, cell]
        exec(with_stub_checks(notebook).cells[0].source, {})
        return capsys.readouterr().out

    assert run("from workshop_utils.exercises import expect\nexpect(False, 'look again')") == FAILED_AS_IT_SHOULD
    raising = "from workshop_utils.exercises import exercise\nexercise(len)(None)"
    assert "cannot read this answer" in run(raising), "which is no hint"
    assert run("from workshop_utils.exercises import passed\npassed('done')") != FAILED_AS_IT_SHOULD


def test_every_cell_comes_twice_but_the_last():
    before, after = (code_cells(change(read(NOTEBOOK))) for change in (lambda same: same, with_every_cell_twice))
    assert [cell.source for cell in after[:-1:2]] == [cell.source for cell in after[1::2]]
    assert [*after[:-1:2], after[-1]] == before


@pytest.mark.parametrize("bar", ["training [00:03, 7 rows of metrics]", "b: 100%|██| 9/9 [00:10<00:00, 94 photos/s] "])
def test_a_finished_bar_is_left_out_and_all_else_stays(bar):
    outputs = [new_output("stream", text=text) for text in (f"{bar}\nseconds [3:10] stay\n{bar}\n", f"{bar}\n")]
    (cell,) = without_bars(new_notebook(cells=[new_code_cell(outputs=outputs)])).cells
    assert [output.text for output in cell.outputs] == ["seconds [3:10] stay\n"]
