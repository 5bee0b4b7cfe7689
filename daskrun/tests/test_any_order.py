"""Whatever happens in whatever order: a worker belongs to one job, no job hurts another, each comes to its end."""

import pytest
from distributed import CancelledError
from fake_cluster import DIES, FOLLOWS, Plan, World
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS = ("a", "b", "c")
when = st.integers(0, 150).map(lambda tenths: tenths / 10)
slot, job = st.sampled_from(SLOTS), st.sampled_from(["job0", "job1", "job2"])
how = st.sampled_from(["returns", "returns", "raises", FOLLOWS, "breaks", "tells and hangs", *DIES])
plans = st.builds(Plan, how, st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 0.1, 2.0]))
limits = st.fixed_dictionaries(
    {
        "max_restarts": st.integers(0, 2),
        "retry": st.sampled_from([(), (KeyError,)]),
        "wait_for_successors": st.sampled_from([2, 30]),
    },
    optional={
        "time_limit": st.sampled_from([0.05, 2, 8]),
        "wait_for_workers": st.sampled_from([1, 20]),
        "stall_after": st.just(1),
    },
).filter(lambda chosen: chosen["max_restarts"] or not chosen["retry"])
sizes = st.sampled_from([(None, None), (1, 1), (2, 2), (1, 2), (1, 3), (3, 3)])
launches = st.tuples(
    when, st.just("launch"), st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), plans), sizes, limits
)
to_jobs = st.tuples(when, st.sampled_from(["stop", "cancel_tasks", "lose_client"]), job)
to_workers = (
    st.tuples(when, st.just("end"), slot, st.booleans())
    | st.tuples(when, st.just("become"), slot, st.sampled_from(["paused", "running"]))
    | st.tuples(when, st.sampled_from(["go_mute", "kill_rank"]), slot)
)
worlds = st.fixed_dictionaries(
    {
        "delay_s": st.sampled_from([0.01, 0.4]),
        "renewal_s": st.sampled_from([1.0, 5.0]),
        "sending_s": st.sampled_from([0.0, 3.0]),
        "is_address_kept": st.booleans(),
    }
)
anything = given(
    worlds,
    st.lists(launches, min_size=1, max_size=3),
    st.lists(to_jobs, max_size=2),
    st.lists(to_workers, max_size=5),
)


def check(how, launches, to_jobs, to_workers):
    with World(SLOTS, **how) as world:
        world.run(*launches, *to_jobs, *to_workers)
        for control in world.controls.values():
            assert len(control.results) == (control.size if control.error is None else 0)
            assert control.is_over and "mistake of its own" not in str(control.error)
            assert isinstance(control.error, (type(None), KeyError, RuntimeError, TimeoutError, CancelledError))
        assert not world.wrongs, world.wrongs
        assert not world.owned(), world.owned()
        assert not any(process.rank for process in world.processes.values()), "a rank is still at work"


test_whatever_happens = settings(max_examples=500, deadline=None, derandomize=True)(anything(check))
test_whatever_happens_often = pytest.mark.weekly(settings(max_examples=5000, deadline=None)(anything(check)))
