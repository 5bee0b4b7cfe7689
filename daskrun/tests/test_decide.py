"""What a job does next, whatever comes first: each order of events is a test without a cluster."""

import pytest
from daskrun.decide import Decisions, Limits, Phase
from daskrun.errors import GO_ON
from distributed import CancelledError

from daskrun import JobError, Stopped, WorkerDied, decide

TWO = ("chosen", ("tcp://a", "tcp://b"))
KILLED, LEFT = (
    ("was killed", "Start again.", True),
    ("is gone", "Start again.", False),
)  # how, what to do, its nanny lives
DIES = [("worker_gone", 1), ("judge",), ("examined", {1: KILLED})]


def told(*events, **limits):
    """Return (decisions, the actions after the last event) of a job that was told these events: (method, arguments)."""
    decisions = Decisions(Limits(**limits))
    actions = decisions.begin()
    for method, *about in events:
        actions = getattr(decisions, method)(*about)
    return decisions, actions


def began(*ranks):
    return [("rank_began", rank) for rank in ranks]


def ended(*ranks):
    return [("rank_ended", rank) for rank in ranks]


def test_a_job_that_succeeds_chooses_starts_runs_fetches_and_frees():
    decisions, actions = told()
    assert decisions.phase is Phase.CHOOSING and isinstance(actions[0], decide.Choose)
    assert decisions.chosen(TWO[1]) == [decide.Start()] and decisions.phase is Phase.STARTING
    assert decisions.rank_began(1) == [] and decisions.phase is Phase.STARTING
    assert decisions.rank_began(0) == [] and decisions.phase is Phase.RUNNING
    assert decisions.rank_ended(1) == []
    assert decisions.rank_ended(0) == [decide.Fetch()]
    assert decisions.fetched() == [decide.Free((), keep=False)]
    assert decisions.freed() == [] and decisions.phase is Phase.FINISHED


def test_a_ranks_error_waits_a_moment_for_a_death_that_may_be_its_cause():
    error = RuntimeError("Connection closed by peer")
    decisions, actions = told(TWO, ("failed", 0, error))
    assert actions == [decide.Later(decide.SETTLE_S, decisions.judge)] and not decisions.over
    assert decisions.worker_gone(1) == [decide.Later(decide.GATHER_S, decisions.judge)]
    assert decisions.judge() == [decide.Examine((1,))]
    decisions.examined({1: ("was killed by signal 9", "Wait.", True)})
    assert isinstance(decisions.error, WorkerDied)
    assert str(decisions.error) == "Rank 1 died: worker tcp://b was killed by signal 9. Wait."


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_error_that_needed_no_death_and_was_told_before_it_is_the_cause(restarts):
    raised = ("failed", 0, ValueError("mine"), False)
    decisions, _ = told(TWO, raised, *DIES[:2], max_restarts=restarts)
    assert isinstance(decisions.error, ValueError) and decisions.error.__notes__ == ["Rank 1 died after that."]
    assert decisions.failures == [] and decisions.phase is Phase.ENDING
    decisions, _ = told(TWO, DIES[0], raised, *DIES[1:])
    assert isinstance(decisions.error, WorkerDied)  # it came after the death


def test_a_cause_that_is_already_known_comes_before_the_end_of_the_time():
    decisions, _ = told(TWO, ("failed", 0, KeyError("cause")), ("time_is_up", TimeoutError()), ("judge",))
    assert isinstance(decisions.error, KeyError)
    decisions, _ = told(TWO, ("time_is_up", TimeoutError()))
    assert isinstance(decisions.error, TimeoutError)


def test_a_death_is_not_survived_once_the_time_is_up():
    decisions, _ = told(TWO, *DIES[:1], ("time_is_up", TimeoutError()), *DIES[1:], max_restarts=1)
    assert isinstance(decisions.error, TimeoutError) and len(decisions.failures) == 1


def test_a_rank_that_raised_and_then_died_is_reported_by_what_it_raised():
    decisions, _ = told(TWO, ("failed", 1, KeyError("cause")), ("worker_gone", 1), ("judge",))
    assert isinstance(decisions.error, KeyError)


def test_an_error_of_the_last_rank_at_work_is_judged_at_once():
    decisions, actions = told(TWO, *ended(0), ("failed", 1, KeyError("x")), ("rank_ended", 1, KeyError("x")))
    assert isinstance(decisions.error, KeyError) and actions == [decide.Free((), keep=False)]


@pytest.mark.parametrize("first", ["the cause", "the consequence"])
def test_a_rank_that_was_stopped_is_never_the_cause(first):
    cause, consequence = ("failed", 1, KeyError("x")), ("rank_ended", 0, Stopped("rank 1 failed first"))
    events = [cause, consequence] if first == "the cause" else [consequence, cause]
    decisions, _ = told(TWO, *events, ("judge",))
    assert isinstance(decisions.error, KeyError)


def test_a_rank_that_could_not_begin_ends_the_job_though_the_others_wait():
    """A rank that cannot reach the store raises without having told: its task is over, the others' are not."""
    decisions, actions = told(TWO, *began(0), ("rank_ended", 1, JobError("could not connect")))
    assert actions == [decide.Later(decide.SETTLE_S, decisions.judge)]
    assert decisions.judge() == [decide.Later(decide.GRACE_S, decisions.grace_over)]
    assert decisions.grace_over() == [decide.Free((0,), keep=False)]  # where nothing began, nothing is killed
    assert "could not connect" in str(decisions.error)


def test_all_workers_that_died_together_are_named():
    three = ("chosen", ("tcp://a", "tcp://b", "tcp://c"))
    decisions, _ = told(three, ("worker_gone", 2), ("worker_gone", 1), ("judge",), ("examined", {1: KILLED, 2: LEFT}))
    told_once = "Ranks 1 and 2 died: worker tcp://b was killed; worker tcp://c is gone. Start again."
    assert str(decisions.error) == told_once
    assert decisions.lost == {2}  # nobody starts its successor


def test_max_restarts_is_advised_to_those_alone_who_have_given_none():
    dies = [("worker_gone", 1), ("judge",), ("examined", {1: ("was killed", GO_ON, True)})]
    assert str(told(TWO, *dies)[0].error).endswith(GO_ON)
    decisions, _ = told(TWO, *ended(0), *dies, ("freed",), TWO, *dies, max_restarts=1)
    assert [str(death) for death in decisions.failures] == ["Rank 1 died: worker tcp://b was killed."]
    assert str(decisions.error) == (
        "Rank 1 died: worker tcp://b was killed. The job had been started again as often as max_restarts=1 allows."
    )
    other = [("worker_gone", 1), ("judge",), ("examined", {1: ("was killed", "Keep fewer tensors.", True)})]
    assert str(told(TWO, *other, max_restarts=1)[0].failures[0]).endswith("Keep fewer tensors.")


def test_a_worker_that_dies_while_the_others_deaths_are_examined_is_examined_too():
    three = ("chosen", ("tcp://a", "tcp://b", "tcp://c"))
    decisions, actions = told(three, ("worker_gone", 1), ("judge",), ("worker_gone", 2), ("examined", {1: KILLED}))
    assert actions == [decide.Examine((2,))]
    decisions.examined({2: LEFT})
    assert "Ranks 1 and 2 died" in str(decisions.error)


def test_a_process_in_which_a_failed_attempt_began_is_replaced_also_where_its_rank_has_ended():
    dies = [*began(0, 1), *ended(0), *DIES]
    assert told(TWO, *dies)[1] == [decide.Free((0,), keep=False)]
    assert told(TWO, *dies, max_restarts=1)[1] == [decide.Free((0,), keep=True)]
    raises = [*began(0, 1), *ended(0), ("failed", 1, KeyError("x")), ("rank_ended", 1, KeyError("x"))]
    assert told(TWO, *raises)[1] == [decide.Free((0, 1), keep=False)]


def test_a_process_in_which_nothing_began_is_never_killed():
    assert told(TWO, *began(1), ("stop", TimeoutError()))[1] == [decide.Free((1,), keep=False)]
    first = [*began(0, 1), *ended(0), *DIES, ("freed",)]
    second = [TWO, *began(1), *DIES, ("grace_over",)]
    assert told(TWO, *first, *second, max_restarts=2)[1] == [decide.Free((), keep=True)]


def test_after_a_success_processes_stay_warm():
    assert told(TWO, *began(0, 1), *ended(0, 1), ("fetched",))[1] == [decide.Free((), keep=False)]


def test_a_death_starts_the_next_attempt_on_as_many_workers_which_are_waited_for():
    decisions, _ = told(TWO, *ended(0), *DIES, max_restarts=1, wait_for_successors=9)
    assert decisions.freed() == [decide.Choose(2, 2, 9)]
    assert decisions.phase is Phase.CHOOSING and decisions.size == 2 and decisions.attempt == 1
    assert decisions.chosen(TWO[1]) == [decide.Start()]
    decisions.rank_ended(0)
    assert decisions.rank_ended(1) == [decide.Fetch()]
    assert len(decisions.failures) == 1 and decisions.error is None


def test_a_pair_of_sizes_goes_on_with_fewer_after_a_death():
    decisions, _ = told(TWO, *ended(0), *DIES, fewest=1, most=4, max_restarts=1)
    assert decisions.freed() == [decide.Choose(1, 2, 30)]


def test_where_no_successor_comes_the_death_is_the_error():
    dies = [*ended(0), *DIES, ("freed",)]
    decisions, actions = told(TWO, *dies, ("refused", JobError("has 1")), max_restarts=1, wait_for_successors=2)
    assert isinstance(decisions.error, WorkerDied) and "wait_for_successors=2" in decisions.error.__notes__[0]
    assert actions == [decide.Free((), keep=False)]


def test_a_job_that_is_stopped_while_it_chooses_gives_up_what_it_gets():
    decisions, actions = told(("stop", CancelledError("stop")))
    assert actions == [] and decisions.ending and not decisions.over
    assert decisions.chosen(TWO[1]) == [decide.Free((), keep=False)]
    assert decisions.freed() == [] and isinstance(decisions.error, CancelledError)


def test_a_job_that_is_stopped_between_two_attempts_is_not_started_again():
    dies = [*ended(0), *DIES]
    decisions, _ = told(TWO, *dies, ("stop", CancelledError("stop")), max_restarts=1)
    assert decisions.freed() == [decide.Free((), keep=False)]  # it had kept its workers
    assert decisions.freed() == [] and isinstance(decisions.error, CancelledError)


def test_a_stop_kills_whom_it_has_to_and_keeps_the_error_of_a_job_that_ends_already():
    assert told(TWO, *began(0, 1), ("stop", TimeoutError()))[1] == [decide.Free((0, 1), keep=False)]
    decisions, _ = told(TWO, ("failed", 0, KeyError("x")), ("judge",), ("stop", TimeoutError()))
    assert isinstance(decisions.error, KeyError)


def test_a_worker_that_dies_while_it_sends_is_a_death_and_not_an_error_of_the_network():
    sends = [*ended(0, 1), ("failed", None, OSError("lost")), *DIES]
    assert isinstance(told(TWO, *sends)[0].error, WorkerDied)
    assert isinstance(told(TWO, *sends[:3], ("judge",))[0].error, OSError)


def test_results_that_are_here_before_the_verdict_on_a_death_count():
    decisions, _ = told(TWO, *ended(0, 1), ("worker_gone", 1), ("fetched",), ("freed",))
    assert decisions.phase is Phase.FINISHED


def test_a_lost_scheduler_ends_the_job_whatever_it_does():
    for events in ([], [TWO], [TWO, *ended(0, 1)], [TWO, ("worker_gone", 1), ("judge",)]):
        decisions, actions = told(*events, ("scheduler_gone", JobError("lost")), max_restarts=3)
        assert actions == [] and decisions.phase is Phase.FAILED
