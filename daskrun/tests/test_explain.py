"""What the launcher says of ranks that wait, do not answer, or have died: text, made without a cluster."""

import json
import signal
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from waiting import until

from daskrun import private
from daskrun.child import main
from daskrun.protocol import Ended, Snapshot
from daskrun.why.look import (
    Call,
    Look,
    is_in_waiting_code,
    look_at,
    place_of,
    silent,
)
from daskrun.why.verdict import explain, how_it_ended, how_worker_ended, stacks, timed_out, unreachable, verdict

TORCH = Path(torch.__file__).parent
MAIN_PY = main.__file__  # the launcher's file, which the lowest frame calls, and which calls the user's function
WRITTEN = f"""Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 9 in wait

Current thread 0x02 (most recent call first):
  File "/home/me/train.py", line 40 in save
  File "/home/me/train.py", line 12 in train
  File "{MAIN_PY}", line 190 in run
  File "<string>", line 1 in <module>
"""


def at(rank, place="train.py:40 in train, in all_reduce", calls=(), groups=("0",), stack="stack"):
    """Return a look. calls: (number, what, done), of group 0; or Calls."""
    calls = tuple(call if isinstance(call, Call) else Call("0", *call) for call in calls)
    return Look(rank, place, f"{stack} at {place}\n", calls, groups, waits=any(not call.done for call in calls))


def test_a_rank_that_went_on_after_an_asynchronous_call_is_not_said_to_wait():
    call = Call("0", 1, "all_reduce of [3]", False)
    goes_on = Look(0, "train.py:31 in main", "", (call,), ("0",))
    said = verdict([goes_on, at(1, "train.py:9 in load")])
    called = "Rank 0 has called all_reduce (collective 1, shape [3]), which is not done, and is at train.py:31 in main."
    assert said.startswith(called)


def test_a_rank_that_waits_for_one_other_is_named_though_the_recorder_has_no_such_call():
    receives = Look(0, "train.py:31 in recv", groups=("0",), waits=True)
    assert verdict([receives, at(1, "train.py:9 in load")]).startswith("Rank 0 waits in recv, at train.py:31 in recv")
    assert "waits in recv" not in verdict([receives._replace(waits=False)])


recorded = c10d._dump_fr_trace_json  # which tests replace


@contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        until(lambda: all(entry["retired"] for entry in json.loads(recorded())["entries"]))  # a moment after its end
        yield
    finally:
        dist.destroy_process_group()


def test_each_backend_of_a_group_numbers_its_collectives_apart(monkeypatch):
    real = c10d._dump_fr_trace_json

    def of_a_machine_with_a_gpu(backend="gloo"):
        """(backend: str = 'gloo') -> bytes"""
        trace = json.loads(real())
        if backend == "nccl2":
            for entry in trace["entries"]:
                entry |= {"profiling_name": "nccl2:all_gather", "retired": False, "time_created_ns": 2**63}
        return json.dumps(trace if backend in ("gloo", "nccl2") else {})

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", of_a_machine_with_a_gpu)
    with one_rank():
        groups, entries = private.recorded_collectives()
    look = look_at(0, Snapshot([("/home/me/train.py", 40, "train", "")], [], groups, entries))
    assert [(call.recorder, call.number, call.done) for call in look.calls] == [("gloo", 1, True), ("nccl2", 1, False)]
    said = verdict([look, at(1, "train.py:9 in load", calls=[Call("0", 1, "all_reduce of [3]", True, "gloo")])])
    assert (
        said.startswith("Rank 0 has called all_gather (collective 1, shape [3])") and "Rank 1 has not called it" in said
    )


@pytest.mark.parametrize("doc", [None, "() -> bytes"])
def test_a_pytorch_with_one_recorder_or_none_is_read_as_far_as_it_goes(doc, monkeypatch):
    real = c10d._dump_fr_trace_json

    def of_an_older_pytorch():
        return real()

    of_an_older_pytorch.__doc__ = doc
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", of_an_older_pytorch if doc else None)
    with one_rank():
        groups, entries = private.recorded_collectives()
    assert [entry["profiling_name"] for entry in entries] == (["gloo:all_reduce"] if doc else [])


@pytest.mark.parametrize(
    ("innermost", "waits"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", True),
        (f"{TORCH}/autograd/graph.py", True),
        (f"{TORCH}/nn/modules/linear.py", False),
        (f"{TORCH}/distributed/_functional_collectives.py {TORCH}/_ops.py {TORCH}/_library/autograd.py", True),
        (f"{TORCH}/distributed/tensor/_dispatch.py {TORCH}/_ops.py", False),
        ("/opt/envs/torch/lib/python3.12/threading.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_a_rank_waits_where_its_innermost_frame_is_in_code_of_pytorch_that_waits(innermost, waits):
    between = [FrameSummary(f"{TORCH}/nn/modules/module.py", 9, "_call_impl")] * 9
    last = [FrameSummary(file, 9, "f") for file in innermost.split(" ")]
    frames = [FrameSummary("/home/me/train.py", 9, "main"), *between, *last]
    assert is_in_waiting_code(frames) is waits


def test_ranks_in_different_collectives_are_named_with_what_each_calls():
    first = at(0, "train.py:9 in step", calls=[(7, "all_reduce of [3] (Long)", False)])
    others = [at(rank, calls=[(7, "all_reduce of [3]", False)]) for rank in (1, 2)]
    said = verdict([first, *others])
    assert "collective 7 is not the same" in said
    assert "rank 0 calls all_reduce of [3] (Long), at train.py:9" in said
    assert "ranks 1 and 2 call all_reduce of [3], at" in said


def test_the_oldest_unfinished_collective_counts_and_not_the_latest():
    """DDP begins several before it waits for the first."""
    slow = at(0, calls=[(5, "all_reduce of [9]", False)])
    begun = at(1, calls=[(5, "all_reduce of [9]", False), (6, "all_reduce of [8]", False)])
    assert verdict([slow, begun]).startswith("Ranks 0 and 1 wait in all_reduce (collective 5, shape [9])")


def test_a_rank_outside_of_a_group_is_not_said_to_miss_its_collective():
    inside = [
        at(0, calls=[Call("1", 1, "all_reduce of [2]", False)], groups=("0", "1")),
        at(1, "train.py:9 in load", groups=("0", "1")),
    ]
    said = verdict([*inside, at(2, "train.py:60 in log")])
    assert (
        "Rank 0 waits in all_reduce (collective 1 in group 1, shape [2])" in said and "Rank 1 has not called it" in said
    )
    assert "Rank 2" not in said


@pytest.mark.parametrize(
    ("source", "other"),
    [("scatter of [3, 3]", "scatter"), ("all_to_all of [3]", "all_to_all of [4]")],
)
def test_calls_in_which_shapes_may_differ_are_the_same_call(source, other):
    first, second = at(0, calls=[(2, source, False)]), at(1, calls=[(2, other, True)])
    said = verdict([first, second, at(2, "train.py:9 in load")])
    assert said.startswith(f"Rank 0 waits in {source.split()[0]} (collective 2") and "Rank 2 has not called it" in said
    assert "Rank 1" not in said


def test_a_call_that_a_rank_has_left_is_told_with_where_it_is_now():
    first = at(0, "train.py:60 in log", calls=[(2, "broadcast of [1]", True)])
    said = verdict([first, at(1, calls=[(2, "barrier", False)])])
    assert "rank 0 called broadcast of [1], and is now at train.py:60" in said and "rank 1 calls barrier, at" in said


def test_all_ranks_in_one_collective_are_said_to_be_in_it_unless_one_is_silent():
    here = [at(rank, calls=[(2, "barrier", False)]) for rank in (0, 1)]
    assert "All ranks have called it" in verdict(here)
    assert "All ranks" not in verdict([*here, unreachable(2)])


def test_ranks_that_have_ended_are_named_and_not_counted_among_all():
    waits = at(1, calls=[(2, "barrier", False)])
    said = verdict([waits], ended=[0])
    assert "Rank 0 has returned, or raised an error" in said and "All ranks" not in said
    assert "Ranks 0 and 2 have returned" in verdict([at(1)], ended=[0, 2])
    assert verdict([], ended=[0, 1]) == "No rank is at work."


def test_a_rank_that_has_not_begun_its_function_has_no_line():
    assert "no line of the function" in place_of([])


def test_a_line_of_a_notebook_is_one_of_a_cell():
    frame = FrameSummary("/tmp/ipykernel_4711/410487560.py", 4, "save", lookup_line=False)
    assert place_of([frame]) == "cell:4 in save"


def test_two_ranks_in_one_line_are_told_alike_whether_or_not_what_they_call_is_python():
    own = FrameSummary("/home/me/train.py", 10, "train", lookup_line=False)
    wrapper = FrameSummary(str(TORCH / "distributed/c10d_logger.py"), 83, "wrapper", lookup_line=False)
    callee = FrameSummary(str(TORCH / "distributed/distributed_c10d.py"), 9, "all_reduce", lookup_line=False)
    assert place_of([own]) == place_of([own, wrapper]) == "train.py:10 in train"
    assert place_of([own, wrapper, callee]) == "train.py:10 in train, in all_reduce"
    assert Look(0, place_of([own, callee])).called == "all_reduce" and Look(0, place_of([own])).called == "train"


def test_the_odd_stack_comes_first_and_equal_ones_stand_together():
    looks = [*(at(rank) for rank in (0, 1, 3)), at(2, "train.py:52 in save")]
    text = stacks(looks)
    assert text.startswith("Rank 2, at train.py:52 in save:\n") and "Ranks 0, 1 and 3, at train.py:40" in text
    assert explain(looks).endswith(text)


def test_the_stack_of_the_rank_that_does_not_wait_comes_first():
    waits = at(0, calls=[(9, "all_reduce of [3]", False)])
    assert stacks([waits, at(1, "train.py:52 in save")]).startswith("Rank 1, at train.py:52 in save:\n")


@pytest.mark.parametrize(
    ("status", "cpu", "words"),
    [
        ("stopped", 0.0, "is stopped"),
        ("sleeping", 0.0, "waits, at train.py"),
        ("running", 0.9, "uses 0.9 of a core, at"),
    ],
)
def test_a_process_that_does_not_answer_is_described(status, cpu, words):
    look = silent(1, 4711, status, cpu, WRITTEN)
    assert words in look.trouble and "process 4711" in look.trouble
    assert look.place == "train.py:40 in save" and 'train.py", line 12, in train' in look.stack
    assert "main.py" not in look.stack
    assert "Rank 1 " + look.trouble in verdict([look])


def test_a_job_that_took_too_long_names_who_is_late():
    error = timed_out(9, 2, [at(1)], ended=[0])
    assert str(error).startswith("Rank 1 had not returned after 9 s.") and "Rank 1, at" in error.__notes__[0]
    assert str(timed_out(9, 2, [], ended=[0])).startswith("Rank 1 had not returned after 9 s.")
    assert str(timed_out(9, 3, [], ended=[2])).startswith("Ranks 0 and 1 had not returned after 9 s.")
    assert str(timed_out(9, 2, [], ended=[0, 1])).startswith("The ranks' results had not arrived after 9 s.")


def end(code, out_of_memory=False, **about):
    return how_it_ended(Ended(code, 2**20, out_of_memory, **about))[0]


def test_how_a_process_ended_is_said_with_its_figures():
    assert "exit code 7" in end(7)
    assert "signal 9 (SIGKILL)" in end(-signal.SIGKILL) and "oom_kill" not in end(-signal.SIGKILL)
    assert "oom_kill" in end(-signal.SIGKILL, True)
    assert "oom_kill" not in end(-signal.SIGTERM, True)
    assert "SIGSEGV" in end(-signal.SIGSEGV, stacks=WRITTEN) and "train.py:40 in save" in end(-11, stacks=WRITTEN)
    assert "at train.py" in end(-11, stacks=WRITTEN) and "another thread" not in end(-11, stacks=WRITTEN)
    elsewhere = WRITTEN.replace("Current thread", "Thread")
    assert "in another thread, with the function at train.py:40" in end(-11, stacks=elsewhere)
    assert "train.py" not in end(-signal.SIGKILL, stacks=WRITTEN)  # of an earlier look: SIGKILL writes nothing
    assert "unknown" in end(-63)
    assert "1.00 GiB" in end(-signal.SIGKILL, limit_bytes=2**30)


def test_a_worker_that_was_closed_is_told_from_one_that_is_lost():
    lost, closed, other = (
        how_worker_ended(reason, None) for reason in ("", "client-restart-workers-1795774746.7351575", "another-reason")
    )
    assert "its host" in lost[0] and "restarted it" in closed[0] and "(another-reason)" in other[0]
    assert all("max_restarts" in cure for _, cure in (lost, closed, other))
    assert "920.00 MiB" in how_worker_ended("", 920 * 2**20)[0]


def test_a_new_start_is_advised_only_where_it_does_not_hide_the_cause():
    for code in (-signal.SIGKILL, -signal.SIGTERM):
        assert "max_restarts" in how_it_ended(Ended(code))[1]
    hidden = [
        Ended(-signal.SIGKILL, limit_bytes=2**30),
        Ended(-signal.SIGKILL, out_of_memory=True),
        Ended(-signal.SIGABRT),
        Ended(7),
        Ended(-signal.SIGSEGV),
    ]
    assert all("max_restarts" not in how_it_ended(ended)[1] for ended in hidden)
