"""Whatever happens in whatever order: a worker belongs to one job, no job hurts another, each comes to its end."""

import pytest
from daskrun.claims import Claimed, Owners, Request, Worker
from daskrun.decide import Decisions, Limits, Phase
from daskrun.errors import Stopped
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daskrun import decide

SLOTS = ("a", "b", "c")


class SimulatedJob:
    """A job's decisions, and what stands for the shell: what was asked for and has not happened yet."""

    def __init__(self, name, decisions):
        self.name, self.decisions = name, decisions
        self.choosing, self.fetching, self.free, self.examining, self.timers, self.mail = None, None, None, [], [], []
        self.members, self.ranks = (), {}  # workers in rank order; live ranks, by rank: the worker's process
        self.carry_out(decisions.begin())

    def tell(self, event, *about, attempt=None):
        if not self.decisions.over and attempt in (None, self.decisions.attempt):
            self.carry_out(getattr(self.decisions, event)(*about))

    def tell_later(self, event, *about):
        self.mail.append((self.decisions.attempt, event, *about))

    def tell_mail(self, position):
        attempt, event, *about = self.mail.pop(position)
        self.tell(event, *about, attempt=attempt)

    def tell_timer(self):
        attempt, event = self.timers.pop(0)
        self.tell(event, attempt=attempt)

    def tell_ends(self):
        attempt, ranks = self.examining.pop(0)
        self.tell("examined", dict.fromkeys(ranks, ("was killed", "", True)), attempt=attempt)

    def carry_out(self, actions):
        for action in actions:
            match action:
                case decide.Choose():
                    self.choosing = action
                case decide.Start():
                    self.ranks = {rank: worker.process for rank, worker in enumerate(self.members)}
                case decide.Later(method=method):
                    self.timers.append((self.decisions.attempt, method.__name__))
                case decide.Examine(ranks):
                    self.examining.append((self.decisions.attempt, ranks))
                case decide.Fetch():
                    self.fetching = self.decisions.attempt
                case decide.Free():
                    assert self.free is None, "its workers are freed twice"
                    self.free = action

    def something_is_asked(self):
        """Return what the shell has to do, in some order."""
        names = ("mail", "timers", "examining", "choosing", "free")
        return [name for name in names if getattr(self, name)] + ["fetching"] * (self.fetching is not None)

    def something_will_happen(self):
        """Whether more is to come, even if ranks that should end never do."""
        at_work = self.decisions.phase in (Phase.STARTING, Phase.RUNNING) and self.ranks
        timers = [event for attempt, event in (*self.timers, *self.examining) if attempt == self.decisions.attempt]
        return any((self.choosing, self.free, timers, self.mail, at_work)) or self.fetching is not None


class Cluster(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.owners, self.jobs, self.now, self.n_processes = Owners(), [], 0.0, 0
        self.workers, self.paused = {}, set()  # by slot
        for slot in SLOTS:
            self.start_worker(slot)

    def start_worker(self, slot):
        self.n_processes += 1
        process = f"{slot}{self.n_processes}"
        self.workers[slot] = Worker(f"tcp://{process}", process, slot, "host", slot)

    def end_worker(self, slot):
        worker = self.workers.pop(slot)
        self.paused.discard(slot)
        for job in self.jobs:
            job.ranks = {rank: process for rank, process in job.ranks.items() if process != worker.process}
            if job.name in self.owners.owners_of(worker.address) and worker.address in job.decisions.workers:
                rank = job.decisions.workers.index(worker.address)
                job.tell_later("worker_gone", rank)

    def busy(self, slot):
        process = self.workers[slot].process
        return tuple(job.name for job in self.jobs if process in job.ranks.values())

    def known(self):
        for slot, worker in self.workers.items():
            status = "paused" if slot in self.paused else "running"
            yield Worker(worker.address, worker.process, slot, "host", slot, status=status, tasks=self.busy(slot))

    def running(self):
        return [job for job in self.jobs if not job.decisions.over]

    def pick(self, data, among):
        return data.draw(st.sampled_from(list(among)))

    # --- what users do

    @precondition(lambda self: len(self.running()) < 3)
    @rule(fewest=st.sampled_from([None, 1, 2]), more=st.integers(0, 1), restarts=st.integers(0, 2))
    def launch(self, fewest, more, restarts):
        most = None if fewest is None else fewest + more
        job = SimulatedJob(f"job{len(self.jobs)}", Decisions(Limits(fewest, most, max_restarts=restarts)))
        self.jobs.append(job)
        self.choose(job, late=True)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["is cancelled", "is cancelled", "takes too long", "loses its kernel"]))
    def job_is_stopped(self, data, how):
        job = self.pick(data, self.running())
        if how == "loses its kernel":
            self.owners.free(job.name)  # once its workers are killed, which is left out here
            job.ranks = {}  # its tasks are cancelled; where a thread goes on, a launch asks the worker itself
            job.tell("scheduler_gone", RuntimeError(how))
        else:
            job.tell("stop", RuntimeError(how))

    # --- what the cluster and the ranks do

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data):
        self.end_worker(self.pick(data, self.workers))

    @precondition(lambda self: len(self.workers) < len(SLOTS))
    @rule(data=st.data())
    def successor_starts(self, data):
        self.start_worker(self.pick(data, sorted(set(SLOTS) - set(self.workers))))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_pauses_or_goes_on(self, data):
        self.paused ^= {self.pick(data, self.workers)}

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: any(job.ranks for job in self.running()))
    @rule(
        data=st.data(),
        how=st.sampled_from(["begins", "returns", "returns", "raises", "is stopped", "tells and hangs"]),
    )
    def rank_acts(self, data, how):
        job = self.pick(data, [job for job in self.running() if job.ranks])
        rank = self.pick(data, job.ranks)
        if how == "begins":
            job.tell_later("rank_began", rank)
        if how in ("raises", "tells and hangs"):
            job.tell_later("failed", rank, KeyError(rank))
        if how in ("returns", "raises", "is stopped"):
            del job.ranks[rank]
            error = {"raises": KeyError(rank), "is stopped": Stopped("another failed")}.get(how)
            job.tell_later("rank_ended", rank, error)

    # --- what the shell does: twice as often as all else

    @precondition(lambda self: any(job.something_is_asked() for job in self.running()))
    @rule(data=st.data(), late=st.booleans(), lost=st.booleans())
    def shell_acts(self, data, late, lost):
        job = self.pick(data, [job for job in self.running() if job.something_is_asked()])
        what = self.pick(data, job.something_is_asked())
        position = data.draw(st.integers(0, len(job.mail) - 1)) if what == "mail" else 0
        self.act(job, what, position, late, lost)

    @precondition(lambda self: any(job.something_is_asked() for job in self.running()))
    @rule()
    def shell_acts_in_order(self):
        for job in self.running():
            for what in job.something_is_asked()[:1]:
                self.act(job, what)

    def act(self, job, what, position=0, late=False, lost=False):
        if what == "mail":
            job.tell_mail(position)
        elif what == "timers":
            job.tell_timer()
        elif what == "examining":
            job.tell_ends()
        elif what == "choosing":
            self.choose(job, late)
        elif what == "fetching":
            attempt, job.fetching = job.fetching, None
            job.tell(*(("failed", None, OSError("lost")) if lost else ("fetched",)), attempt=attempt)
        else:
            self.free(job)

    def choose(self, job, late):
        late = late or job.decisions.ending
        wanted = job.choosing.fewest if late else job.choosing.most
        request = Request(job.name, job.name, wanted, job.choosing.most)
        answer = self.owners.claim(request, list(self.known()), self.now)
        if isinstance(answer, Claimed):
            job.choosing, job.members = None, answer.workers
            job.tell("chosen", [worker.address for worker in answer.workers])
        elif job.decisions.ending or (late and not answer.soon):
            job.choosing = None
            job.tell("refused", answer.error)

    def free(self, job):
        action, job.free, job.fetching = job.free, None, None
        killed = [job.members[rank] for rank in action.kill]
        for worker in killed:
            there = self.workers.get(worker.slot)
            if there and there.process == worker.process:
                assert set(self.busy(worker.slot)) <= {job.name}, f"{job.name} kills another job's worker"
                assert self.owners.owned().get(worker.slot) == job.name, f"{job.name} kills what it does not own"
                self.end_worker(worker.slot)
        job.ranks = {}
        self.owners.replace(killed, self.now)
        if not action.keep:
            self.owners.free(job.name)
        job.tell("freed")

    # --- the invariant

    @invariant()
    def a_rank_runs_only_where_its_job_owns_the_worker_and_alone(self):
        for slot in self.workers:
            busy = self.busy(slot)
            assert len(busy) <= 1
            for name in busy:
                assert self.owners.owned().get(slot) == name

    @invariant()
    def nothing_is_held_when_a_job_is_over(self):
        for job in self.jobs:
            if job.decisions.over:
                assert job.name not in self.owners.owned().values()
                assert not job.ranks

    @invariant()
    def nothing_waits_without_an_end(self):
        for job in self.running():
            assert job.something_will_happen(), f"{job.name} waits for nothing, {job.decisions.phase.value}"


class TestCluster(Cluster.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.weekly
class TestClusterThoroughly(Cluster.TestCase):
    settings = settings(max_examples=500, stateful_step_count=50, deadline=None)
