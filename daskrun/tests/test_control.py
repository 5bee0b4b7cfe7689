"""What a job does next, whatever comes first: each order of events is a test in virtual time, without a cluster."""

from unittest import mock

import pytest
from fake_cluster import FOLLOWS, Plan, World

from daskrun import JobError, WorkerDied

HANGS, LONG, SHORT, TELLS = Plan("hangs"), Plan(takes_s=90), Plan(takes_s=2), Plan("tells and hangs", 2)
KILLED, ABORTED = Plan("is killed", 2), Plan("is aborted", 2)


def ended(*ranks, events=(), slots="", size=None, world=(), **limits):
    """Return (Control, World) of a job that has ended. ranks: plans of its first attempt. events: as of `World.run`."""
    with World(slots or "abc"[: len(ranks)], **dict(world)) as cluster:
        plans = {(0, rank): plan for rank, plan in enumerate(ranks)}
        control = cluster.launch(plans, size or (len(ranks), len(ranks)), limits)
        cluster.run(*events)
    assert not cluster.wrongs and not cluster.owned(), cluster.wrongs or cluster.owned()
    return control, cluster


def pids(cluster):
    return [process.pid for _, process in sorted(cluster.processes.items())]


@pytest.mark.parametrize(
    "ranks, events, cause",
    [
        ((Plan(FOLLOWS, 2), HANGS), [(2.6, "end", "b")], WorkerDied),
        ((Plan(FOLLOWS, 2), HANGS), [], RuntimeError),
        ((Plan(FOLLOWS, 2), HANGS), [(3.5, "end", "b")], RuntimeError),  # too late to be its cause
        ((TELLS, HANGS), [(2.6, "end", "b")], KeyError),
        ((TELLS, HANGS), [(2.1, "end", "b")], WorkerDied),
        ((HANGS, TELLS), [(2.6, "end", "b")], KeyError),  # it raised, and then it died
        ((Plan("breaks", 1), HANGS), [], JobError),
        ((KILLED, Plan(FOLLOWS, 2)), [], WorkerDied),
        ((Plan(FOLLOWS, 1.8), KILLED), [], WorkerDied),
        ((ABORTED, Plan("raises", 2.3)), [], KeyError),  # NCCL aborts a rank where another one has failed
        ((ABORTED, Plan(FOLLOWS, 2)), [], WorkerDied),
        ((KILLED, Plan("raises", 2.3)), [], WorkerDied),
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_the_cause_is_a_death_or_what_a_rank_raised_by_itself(ranks, events, cause, restarts):
    control, cluster = ended(*ranks, events=events, max_restarts=restarts)
    is_survived = restarts and cause is WorkerDied
    assert type(control.failures[0] if is_survived else control.error) is cause
    assert bool(control.results) == bool(is_survived)
    assert pids(cluster) == [1, 3 if events else 2]  # no worker is replaced because of a rank


def test_an_exception_that_the_user_names_is_survived_and_no_other():
    control, _ = ended(Plan("raises", 2), HANGS, max_restarts=1, retry=(KeyError,))
    assert control.results and [type(error) for error in control.failures] == [KeyError]
    control, _ = ended(Plan("raises", 2), HANGS, max_restarts=1, retry=(OSError,))
    assert isinstance(control.error, KeyError) and not control.failures


def test_all_ranks_that_died_together_are_named_with_how_they_ended():
    control, _ = ended(HANGS, HANGS, HANGS, events=[(2, "end", "b"), (2.05, "kill_rank", "c")])
    deaths = control.error.deaths
    assert list(deaths) == [1, 2] and deaths[1] is None and deaths[2].code == -9


def test_a_job_is_started_again_as_often_as_max_restarts_allows():
    control, _ = ended(HANGS, HANGS, events=[(2, "end", "b"), (5, "end", "a")], max_restarts=2)
    assert len(control.results) == 2 and [type(death) for death in control.failures] == [WorkerDied] * 2
    control, _ = ended(HANGS, HANGS, events=[(2, "end", "b"), (5, "end", "a")], max_restarts=1)
    assert len(control.failures) == 1 and "max_restarts=1 allows" in str(control.error)
    assert control.attempt.id.number == 1


@pytest.mark.parametrize("patience_s", [2, 70])
def test_a_worker_that_is_lost_is_waited_for_as_long_as_the_user_said(patience_s):
    events = [(2, "end", "b", True)]
    control, cluster = ended(HANGS, HANGS, events=events, max_restarts=1, wait_for_successors=patience_s)
    if patience_s > 60:
        assert control.results
    else:
        assert isinstance(control.error, WorkerDied) and "wait_for_successors=2" in control.error.__notes__[-1]
        assert cluster.loop.now < 110


def test_a_pair_of_sizes_shrinks_and_grows_back():
    sizes = []
    with World("abc") as world:
        plans = {(attempt, rank): LONG for attempt in range(3) for rank in range(3)}
        control = world.launch(plans, (1, 3), {"max_restarts": 2, "wait_for_successors": 10})
        for at in (1, 50):
            world.loop.call_at(at, lambda: sizes.append(control.size))
        world.run((2, "end", "c", True), (80, "end", "b"))  # c's host is back after a minute
    assert [*sizes, control.size] == [3, 2, 3] and len(control.failures) == 2 and len(control.results) == 3


def test_a_silence_begins_anew_with_each_row_and_is_told_once():
    with World("ab") as world:
        control, told = world.launch({(0, 0): LONG, (0, 1): LONG}, (2, 2), {"stall_after": 10}), []
        for at in (5, 12, 19, 26, 50):
            world.loop.call_at(at, world.log_row)
        for at in (25, 35, 45, 55, 65):
            world.loop.call_at(at, lambda: told.append(len(control.warnings)))
        world.run()
    assert told == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "ranks, how",
    [
        ((SHORT, SHORT), {"slots": "a", "wait_for_workers": 60}),  # while it waits for workers
        ((SHORT, HANGS), {}),  # while it runs
        ((SHORT, SHORT), {"world": {"sending_s": 9}}),  # while it fetches
        ((SHORT, HANGS), {"events": [(4.95, "end", "b")], "max_restarts": 1}),  # after a death that it would survive
    ],
)
def test_a_job_takes_no_longer_than_its_timeout(ranks, how):
    control, cluster = ended(*ranks, time_limit=5, **how)
    assert isinstance(control.error, TimeoutError) and cluster.loop.now < 109
    assert not control.results


def test_a_cause_that_is_known_comes_before_the_end_of_the_time():
    assert isinstance(ended(TELLS, HANGS, time_limit=2.5)[0].error, KeyError)


def test_a_stop_ends_the_grace_of_ranks_that_do_not_end():
    _, cluster = ended(HANGS, HANGS, events=[(2, "end", "b"), (2.5, "stop")], max_restarts=1)
    assert cluster.loop.now < 103


def test_tasks_that_somebody_cancels_end_the_job():
    assert "lost its tasks" in str(ended(HANGS, HANGS, events=[(2, "cancel_tasks")])[0].error)


def test_a_rank_whose_worker_does_not_answer_ends_when_that_does():
    events = [(1.7, "stop"), (2.0, "go_mute", "b")]  # ranks begin at 1.7 s, which is heard at 2.5 s
    _, cluster = ended(LONG, LONG, events=events, world={"delay_s": 0.4})
    assert not any(process.rank for process in cluster.processes.values())


def test_a_worker_that_pauses_is_no_reason_to_end_a_job_that_survives_a_death():
    events = [(0.1, "become", "b", "paused"), (0.5, "end", "a"), (4, "become", "b", "running")]
    control, _ = ended(SHORT, SHORT, events=events, max_restarts=1)
    assert control.results and len(control.failures) == 1


@pytest.mark.parametrize(
    "begins_s, events, why",
    [
        (9, [(1, "become", "b", "paused")], "Rank 1 cannot begin: worker tcp://b2 is paused"),
        (400, [], "Rank 1 has not begun within 300 s"),
    ],
)
def test_a_rank_that_cannot_begin_ends_the_job_and_is_named(begins_s, events, why):
    control, cluster = ended(HANGS, Plan(begins_s=begins_s), events=events)
    assert isinstance(control.error, JobError) and why in str(control.error)
    assert pids(cluster) == [1, 2]


@pytest.mark.parametrize("is_address_kept", [False, True])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_dies_while_it_sends_its_result_is_a_death(restarts, is_address_kept):
    world = {"sending_s": 2.0, "is_address_kept": is_address_kept}
    control, _ = ended(SHORT, SHORT, events=[(3, "end", "b")], world=world, max_restarts=restarts)
    assert bool(control.results) == bool(restarts)
    assert isinstance(control.failures[0] if restarts else control.error, WorkerDied)


@pytest.mark.parametrize(
    "what",
    ["scheduler.worker_ends", "cluster.looks", "control.timed_out", "control.stalled", "attempt.how_worker_ended"],
)
def test_a_diagnosis_that_fails_ends_no_job_and_hides_no_error(what):
    what = f"daskrun.{what}" if "scheduler" in what else f"daskrun.client.{what}"
    with mock.patch(what, side_effect=ZeroDivisionError, __name__=what):
        control, _ = ended(SHORT, LONG, events=[(30, "end", "b")], max_restarts=1, stall_after=9)
        assert control.results and len(control.failures) == 1
        control, _ = ended(SHORT, LONG, time_limit=30, stall_after=9)
        assert isinstance(control.error, TimeoutError)


@pytest.mark.parametrize("what", ["submit", "introduce", "result"])
def test_a_mistake_of_the_launcher_ends_the_job_and_says_so(what):
    with mock.patch(f"daskrun.client.cluster.Cluster.{what}", side_effect=ZeroDivisionError):
        control, _ = ended(SHORT, SHORT)
    assert isinstance(control.error, JobError) and "mistake of its own" in str(control.error)
