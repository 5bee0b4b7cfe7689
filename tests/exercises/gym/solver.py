"""A scripted solver of the gym's cases, which knows nothing but the looks that the notebook teaches."""

import math
import re
import time

HUNG_S = 10  # without a row of metrics: a DataLoader looks after its readers every 5 s, and a job ends 3 s later
HUNG_STEPS = 50  # so many of the job's own steps without a row, if the machine is busy and that takes longer
LATE = 20  # what is slow has begun by this step


def settle(case):
    """Wait until the job has ended, or logs nothing any more; return whether it hangs, and the result's text."""
    n_rows, changed = -1, time.monotonic()
    while "has not ended" in (said := case.result(wait_s=1)):
        if len(metrics := case.metrics()) != n_rows:
            n_rows, changed = len(metrics), time.monotonic()
        step_s = metrics.groupby("step")["time"].max().diff().median()
        if time.monotonic() - changed > max(HUNG_S, HUNG_STEPS * step_s):
            return True, said
    return False, said


def solve(case):
    """Return the answer as keywords of `Case.diagnose`, without the cure."""
    hangs, said = settle(case)
    if hangs:
        return of_a_hang(case)
    if "has ended well" not in said:
        return of_an_error(case, said)
    return of_numbers(case.metrics(), case.clean)


def of_a_hang(case):
    told, metrics = case.explain(), case.metrics()
    last = int(metrics["step"].max())
    for words, fault in (("is stopped", "process stopped"), ("does not (?:answer|let Python run)", "GIL held")):
        if found := re.search(rf"Rank (\d) {words}", told):
            return answer(fault, found[1], last + 1)
    if found := re.search(r"Rank (\d) has not called it: it is at batches.py", told):
        return answer("stalled read", found[1], last + 1)
    calls = {int(rank): call for rank, call in re.findall(r"rank (\d) calls (.*? in \w+(?:, in \w+)?)", told)}
    for rank, call in calls.items():
        other = calls[1 - rank]
        if call.startswith("broadcast") and "in backward" in other:
            return answer("uneven batches", rank, last + 1)
        if call.startswith("barrier") and "in backward" in other:
            return answer("collective on one rank", rank, last)
        if call.startswith("barrier"):
            return answer("collectives swapped", rank, last)
    raise AssertionError(told)


def of_an_error(case, said):
    metrics = case.metrics()
    if found := re.search(r"Rank (\d) died: .*memory limit", said):
        mine = metrics[metrics["rank"] == int(found[1])]
        grown = mine[mine["memory_mb"].diff() > 100]
        step = grown["step"].min() if len(grown) else mine["step"].max() + 1
        return answer("memory leak", found[1], step)
    if said.startswith("RuntimeError: DataLoader worker"):
        return answer("reader killed", re.search(r"From rank (\d)", said)[1], metrics["step"].max() + 1)
    raise AssertionError(said)


def of_numbers(metrics, clean):
    """Return the answer for a job that has ended well: first what is wrong in its numbers, then what is slow."""
    per_step = metrics.groupby("step")
    for column, n_values, fault in (("weights", 2, "weights drift"), ("pixels", 1, "same images")):
        n_found = per_step[column].nunique()
        if len(found := n_found[n_found == n_values]):
            return answer(fault, None, found.index[0])
    both = metrics.merge(clean, on=["step", "rank"], suffixes=("", "_clean"))
    gradient = both[(both["gradient"] / both["gradient_clean"] - 1).abs() > 1e-3]
    momentum = both[(both["momentum"] / both["momentum_clean"] - 1).abs() > 1e-3]
    if len(momentum):
        first = gradient[gradient["step"] == momentum["step"].min()]
        if len(first):
            return answer("bad gradient", first["rank"].iloc[0], first["step"].iloc[0])
        return answer("bad resume", None, momentum["step"].min())
    return of_times(metrics)


def of_times(metrics):
    columns = ["load_s", "compute_s", "comm_s", "torch_threads"]
    # A fault makes all of the later steps slow, and another program on the machine only some.
    late = metrics[metrics["step"] > LATE].groupby("rank")[columns].quantile(0.25)
    first = metrics.groupby("rank")["torch_threads"].first()
    if (late["torch_threads"] > first).all():
        grown = metrics[metrics["torch_threads"] > metrics["rank"].map(first)]
        return answer("too many threads", None, grown["step"].min())
    worst = late["load_s"].idxmax()
    if late["load_s"][worst] > 2 * late["compute_s"][worst]:
        return answer("slow input", worst, onset(metrics, worst, "load_s"))
    worst = late["compute_s"].idxmax()
    if late["compute_s"][worst] > 2 * late["compute_s"][1 - worst]:
        return answer("slow rank", worst, onset(metrics, worst, "compute_s"))
    if late["comm_s"].min() > 1.5 * late["compute_s"].max():
        return answer("slow link", None, onset(metrics, 0, "comm_s"))
    return answer("none", None, None)


def onset(metrics, rank, column):
    """Return the step that parts the column best in two: each part is near to its own median, on a scale of ratios."""
    seconds = metrics[metrics["rank"] == rank].set_index("step")[column].clip(lower=1e-3).map(math.log)

    def spread(step):
        parts = seconds.loc[: step - 1], seconds.loc[step:]
        return sum((part - part.median()).abs().sum() for part in parts)

    return min(range(11, LATE), key=spread)


def answer(fault, rank, step):
    return {
        "fault": fault,
        "rank": None if rank is None else int(rank),
        "step": None if step is None else int(step),
    }
