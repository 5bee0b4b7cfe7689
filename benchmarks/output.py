"""What printing costs: a script's own loop that prints, and the whole command, under torchrun and under `daskrun`.

    python benchmarks/output.py [rounds]

Both commands write to files, in turn. A loop's time is that of the slower of two ranks; memory is the most that all
processes of the command had together (proportional set size, looked at each 0.1 s). Writes
results/<device>-output.json.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from record import write_result

SCRIPT = """
import sys, time
begin = time.perf_counter()
for number in range(int(sys.argv[1])):
    print("step", number, "of the training, loss 0.1234")
print("loop", time.perf_counter() - begin, file=sys.stderr)
"""
BIN = Path(sys.executable).parent
COMMANDS = {
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"],
    "daskrun": [BIN / "daskrun", "--standalone", "-n", "2"],
}


def memory(process):
    """Return what a process and its descendants have together, in MiB."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            total += one.memory_full_info().pss
    return total / 2**20


def measured(command, folder, n_lines):
    """Return {loop_s, all_s, most_mib, lines} of one run."""
    out, err = folder / "out", folder / "err"
    begin, most = time.perf_counter(), 0.0
    with out.open("w") as stdout, err.open("w") as stderr:
        started = subprocess.Popen([*command, "script.py", str(n_lines)], cwd=folder, stdout=stdout, stderr=stderr)
        process = psutil.Process(started.pid)
        while started.poll() is None:
            with suppress(psutil.Error):
                most = max(most, memory(process))
            time.sleep(0.1)
    loops = [float(line.rpartition(" ")[2]) for line in err.read_text().splitlines() if "loop " in line]
    n_printed = len(out.read_text().splitlines())
    assert (started.returncode, len(loops), n_printed) == (0, 2, 2 * n_lines), err.read_text()
    return {"loop_s": max(loops), "all_s": time.perf_counter() - begin, "most_mib": most}


def main(rounds):
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        for n_lines in (5_000, 100_000):
            runs = results[n_lines] = {tool: [] for tool in COMMANDS}
            for _ in range(rounds):
                for tool, command in COMMANDS.items():
                    runs[tool].append(measured(command, folder, n_lines))
            for figure in ("loop_s", "all_s", "most_mib"):
                theirs, ours = (statistics.median(run[figure] for run in runs[tool]) for tool in COMMANDS)
                print(
                    f"{n_lines} lines, {figure}: torchrun {theirs:.2f}, daskrun {ours:.2f}, {ours / theirs:.2f} times"
                )
    print(write_result("output", {"rounds": rounds, "runs": results}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
