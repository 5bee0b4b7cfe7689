"""What all checks share: a hint in one line, never a traceback, and whose answer it was."""

import builtins
import re

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from IPython.core.interactiveshell import InteractiveShell

from workshop_utils.exercises import (
    Function,
    NotYet,
    exercise,
    expect,
    expect_equal,
    expect_type,
    is_stub,
    number,
    pair,
    passed,
    reconcile,
    shown,
)


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    yield shell
    InteractiveShell.clear_instance()
    del builtins.__IPYTHON__  # else the tests that follow would be in a notebook


@exercise
def check_two(answer):
    expect(answer == 2, "add one and one.")
    passed("Two.")


def stub(x):
    return None


def with_a_docstring(x):
    """Add one."""


def half_done(x):
    return x


@pytest.mark.parametrize("answer", [None, stub, with_a_docstring, lambda x: None])
def test_a_stub_is_known(answer):
    assert is_stub(answer)


@pytest.mark.parametrize("answer", [0, False, "", [], half_done, lambda x: 1, lambda x: stub(x), lambda x: 1 / 0])
def test_anything_else_is_an_answer_and_no_function_is_called_to_find_out(answer):
    assert not is_stub(answer)


def test_a_given_function_is_a_stub_until_its_program_changes():
    def under_another_name(x):
        return x

    assert is_stub(under_another_name, given=half_done)
    assert not is_stub(lambda x: x + 1, given=half_done)


def test_a_solution_is_checked_while_there_is_no_answer(capsys):
    cell = {"check": check_two, "stub": stub, "our_answer": 2}
    exec("check(None); check(stub)", cell)
    exec("our_answer = 3; check(2)", cell)
    assert [line.split(".")[0] for line in capsys.readouterr().out.splitlines()] == [
        "That was our solution",
        "That was our solution",
        "Correct",
    ]
    with pytest.raises(NotYet, match="add one and one"):
        exec("check(3)", {"check": check_two, "our_answer": 2})


def test_a_check_of_a_closed_cluster_says_so():
    @exercise
    def check(answer, client):
        client.submit(abs, answer).result()

    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        check(-1, client)
    with pytest.raises(NotYet, match="the cluster is closed"):
        check(-1, client)


def test_an_error_in_an_attendees_cell_names_its_line(shell):
    shell.compile.get_code_name = lambda *of_a_cell: "/tmp/ipykernel_1/2.py"
    shell.run_cell("def my_answer(x):\n    return [1 / each for each in [x]]")
    check = exercise(lambda answer: print(answer(0)))
    with pytest.raises(NotYet, match="my_answer.*ZeroDivisionError.*in the line"):
        check(shell.user_ns["my_answer"])


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        (
            (np.int64(12), 15.0, 150.0, "s"),
            "your guess 12 s|simple estimate 15 s|measured 150 s 10.00 times the estimate",
        ),
        (
            (torch.tensor(1), 1.0, 2.0, "s"),
            "your guess 1.00 s|simple estimate 1.00 s|measured 2.00 s 2.00 times the estimate",
        ),
        ((4, 2.5, 3, "pats"), "your guess 4 pats|simple estimate 2 pats|measured 3 pats"),  # a count has no ratio
        ((None, 1.41, -3.96, "points"), "simple estimate 1.41 points|measured -3.96 points"),  # nor do unlike signs
        (
            (None, 0.0231, 0.3206, "s"),
            "simple estimate 0.023 s|measured 0.321 s 13.88 times the estimate",
        ),
        ((None, 9.31, 108.3, "ms"), "simple estimate 9.3 ms|measured 108.3 ms 11.63 times the estimate"),
        ((None, 93.75, 8.33, "%"), "simple estimate 93.8 %|measured 8.3 % 0.09 times the estimate"),
        ((None, 0.0003, 32.3, "%"), "simple estimate 0.00 %|measured 32.30 %"),  # nothing is compared with zero
    ],
)
def test_a_guess_if_there_is_one_stands_beside_an_estimate_and_the_measurement(numbers, shown, capsys):
    reconcile(*numbers)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == shown.split("|")


@pytest.mark.parametrize("guess", ["12 s", True, [3]])
def test_a_guess_that_is_no_number_costs_no_measurement(guess, capsys):
    with pytest.raises(NotYet, match="without its unit"):
        reconcile(guess, 1.0, 2.0, "s")
    assert capsys.readouterr().out.split()[-7:] == ["measured", "2.00", "s", "2.00", "times", "the", "estimate"]


def test_a_check_of_a_function_says_what_cannot_be_called():
    def check_double(double: Function):
        double(1)

    for answer, hint in ((4, "double should be a function, not 4"), (None, "double is still None")):
        with pytest.raises(NotYet, match=hint):
            exercise(check_double)(answer)


MISTAKES = {"that is the half.": 1, "that is the double.": 4.0}


@pytest.mark.parametrize(
    ("check", "hint"),
    [
        (lambda: expect_equal(4, 2, "no.", MISTAKES, about="You say 4: "), "You say 4: that is the double."),
        (lambda: expect_equal([0.5, 1.004], 2, "no.", MISTAKES, within=0.5), "that is the half."),
        (lambda: expect_equal(float("nan"), 2, "no.", MISTAKES, within=5), "no."),
        (lambda: expect_type(list(range(999)), dict, "a dict"), "a dict, not [0, 1, 2, 3, 4, 5, ...]."),
        (lambda: pair("ab", "return two"), "return two, not 'ab'."),
        (lambda: number(True, "return a number"), "return a number, not True."),
    ],
)
def test_a_hint_names_the_mistake_or_shows_the_answer_in_a_line(check, hint):
    with pytest.raises(NotYet) as raised:
        check()
    assert str(raised.value) == hint


def test_an_answer_of_many_lists_in_lists_is_shown_in_a_line():
    assert re.fullmatch(r"\[\[\['long .{1,99} …", shown([[["long " * 9] * 9] * 9] * 9))


def test_an_answer_may_have_any_type_that_says_the_same():
    expect_equal({1, 2}, {2, 1}, "no.")
    expect_equal(torch.tensor([1.0, 2.0]), [1.001, 2.0], "no.", within=0.01)
    for two in ((1, 2), [1, 2], np.array([1, 2]), torch.tensor([1, 2])):
        assert [number(one, "a number") for one in pair(two, "two")] == [1, 2]
    assert number(torch.ones(1, requires_grad=True), "a number") == number(np.array([[1]]), "a number") == 1


def test_a_hint_is_one_line_in_a_notebook(shell, capsys):
    result = shell.run_cell("from workshop_utils.exercises import expect\nexpect(False, 'look at the index.')")
    assert isinstance(result.error_in_exec, NotYet)
    assert capsys.readouterr().out == "Not yet: look at the index.\n"
