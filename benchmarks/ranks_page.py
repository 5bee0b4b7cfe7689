"""What the page of ranks costs: launches and steps with it open in a browser and closed, and the scheduler's own work.

    python benchmarks/ranks_page.py [rounds]

In each round a warm launch of a function that does nothing, and a training of 100 small steps which logs each, run on
two local workers with the page closed and open, in turn. The scheduler's work is measured on its own: what it takes to
keep 1,000 rows of 1,000 ranks, and to show them once, in seconds of a core. Needs Chromium and Playwright. Writes
results/<device>-ranks-page.json.
"""

import statistics
import sys
import time
from pathlib import Path
from unittest import mock

from playwright.sync_api import sync_playwright
from record import write_result

import daskrun
from daskrun import page
from daskrun.claims import Request, Worker
from daskrun.record import Record

CHROMIUM = Path("/usr/bin/chromium")
STEPS, LAUNCHES = 100, 20
RANKS = ROWS = 1_000


def nothing():
    pass


def train():
    import torch

    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, begin = torch.ones(64, 1000), time.perf_counter()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        daskrun.log_metrics(step=step, loss=loss, lr=0.01)
    return (time.perf_counter() - begin) / STEPS


def measured(client):
    """Return {launch_s, step_s}, medians; each step is that of the slower rank."""
    launches = []
    for _ in range(LAUNCHES):
        begin = time.perf_counter()
        daskrun.run(client, nothing)
        launches.append(time.perf_counter() - begin)
    return {"launch_s": statistics.median(launches), "step_s": max(daskrun.run(client, train))}


def scheduler_work():
    """Return seconds of a core: {keep_s, of ROWS rows; show_s, one update of the page}."""
    record = Record()
    workers = [Worker(f"tcp://{number}", f"{number}", f"{number}", "host", str(number)) for number in range(RANKS)]
    record.wants(Request("train-1", "client"), 0)
    record.begins("train-1", workers)
    for rank in range(RANKS):
        record.hear("began", "train-1", [0, rank, ""], 0)
    begin = time.process_time()
    for number in range(20 * ROWS):
        row = {"rank": number % RANKS, "attempt": 0, "time": 0.0, "step": number // RANKS, "loss": 0.5, "lr": 0.1}
        record.hear("row", "train-1", [row | {"worker": "tcp://1"}], number / ROWS)
    kept = (time.process_time() - begin) / 20
    with mock.patch.object(page, "record_of", lambda scheduler: record):
        shown = page.Ranks(mock.Mock())
        begin = time.process_time()
        for _ in range(20):
            record.version += 1
            shown._update(0.0)
    return {"keep_s": kept, "show_s": (time.process_time() - begin) / 20}


def main(rounds):
    work = scheduler_work()
    print(f"to keep {ROWS} rows of {RANKS} ranks: {work['keep_s']:.4f} s; to show them: {work['show_s']:.4f} s")
    runs = {"closed": [], "open": []}
    with sync_playwright() as playwright, daskrun.start_local(2) as client:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        measured(client)
        for number in range(rounds):
            for how in sorted(runs, reverse=bool(number % 2)):
                viewer = browser.new_page()
                if how == "open":
                    viewer.goto(client.dashboard_link.replace("/status", "/ranks"))
                    viewer.get_by_text("finished").first.wait_for()
                runs[how].append(measured(client))
                viewer.close()
        browser.close()
        client.shutdown()
    for figure in ("launch_s", "step_s"):
        ratios = [opened[figure] / closed[figure] for opened, closed in zip(runs["open"], runs["closed"], strict=True)]
        print(f"{figure}, open / closed: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(write_result("ranks-page", {"rounds": rounds, "scheduler": work, "runs": runs}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
