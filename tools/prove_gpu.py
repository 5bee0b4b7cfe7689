"""Prove the GPU paths on a machine with a GPU: tests, notebooks and benchmarks, each a step that can run alone.

    python tools/prove_gpu.py [--python PYTHON] [--logs FOLDER] [STEP ...]

Without STEPs it makes all, and goes on after one that fails. It needs nothing but Python, so that it also runs beside
a PyTorch that is already there: PYTHON is the one to prove, by default that of the project's .venv. What a step prints
goes to FOLDER, figures to benchmarks/results. It exits with 1 where a step failed, and at once where there is no GPU.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV_PYTHON = ROOT / ".venv/bin/python"
# Notebook 05 is about storage, and needs a server beside it.
NOTEBOOKS = ("01", "02", "03", "04", "06", "08", "09", "07", "11", "12")
BENCHMARKS = ("decode", "inference", "ddp", "runs")
LIMIT_S = 590  # of a step: such a machine may be lent for ten minutes at a time
# Notebooks and runs are made with the sketches and their weights, whatever is set on this machine.
UNSET = {"WORKSHOP_DATA", "WORKSHOP_NAMES", "WORKSHOP_WEIGHTS", "DASK_SCHEDULER_ADDRESS"}


def steps():
    """Return {name of a step: the arguments that its Python gets}."""
    with_gpu = [
        str(path.relative_to(ROOT))
        for tests in ("daskrun/tests", "tests")
        for path in sorted((ROOT / tests).rglob("test_*.py"))
        if "@pytest.mark.gpu" in path.read_text()
    ]
    return {
        "environment": ("tools/gpu_environment.py",),
        "tests": ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *with_gpu),
        **{f"notebook-{number}": ("tests/notebooks/compare.py", number) for number in NOTEBOOKS},
        **{name: (f"benchmarks/{name}.py",) for name in BENCHMARKS},
    }


def main():
    known = steps()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one of: {', '.join(known)}")
    parser.add_argument("--python", default=str(VENV_PYTHON), help="default: %(default)s")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/gpu", help="default: %(default)s")
    asked = parser.parse_args()
    if unknown := [name for name in asked.steps if name not in known]:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(known)}")
    if reason := why_not(asked.python):
        sys.exit(f"The GPU paths cannot be proved here: {reason}")
    python = os.path.abspath(shutil.which(asked.python))  # steps run in the project's folder
    asked.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and the step with it
    rows = []
    for name in asked.steps or known:
        print(f"{name} … ", end="", flush=True)
        log = asked.logs / f"{name}.log"
        start = time.monotonic()
        kept = {"WORKSHOP_WEIGHTS"} if name == "inference" else set()  # with ImageNet's it says so in its figures
        result = outcome((python, *known[name]), log, UNSET - kept)
        rows.append((name, result, time.monotonic() - start))
        print(result)
        if result != "passed":
            print("".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-15:]))
    report(rows, asked.logs)
    sys.exit(any(result != "passed" for _, result, _ in rows))


def why_not(python):
    """Return why nothing can be proved on this machine with this Python, and what to do; None where it can."""
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode:
        return "nvidia-smi finds no GPU on this machine. Run make gpu on one that has an NVIDIA GPU and its driver."
    if python == str(VENV_PYTHON):
        subprocess.run(["make", "--no-print-directory", "setup"], cwd=ROOT, check=True)
    if not shutil.which(python):
        return f"there is no Python at {python}."
    sees = "import sys, torch; torch.cuda.is_available() or sys.exit(f'PyTorch {torch.__version__} sees no GPU')"
    result = subprocess.run([python, "-c", sees], capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return f"{python} says: {last}. Compare its PyTorch's CUDA version with the driver's, in nvidia-smi."
    return None


def outcome(command, log, unset):
    """Run the command into `log` until it ends or LIMIT_S is over; return "passed" or how it ended."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "daskrun/src"), os.environ.get("PYTHONPATH"))))
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "WORKSHOP_CACHE": str(log.parent.resolve() / "cache")}
    with log.open("w") as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT_S} s"
        finally:
            end(process)
    return f"failed, exit code {code}" if code else "passed"


def end(process):
    """End a step's process and what it has left in its group, such as a cluster's workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(rows, logs):
    lines = [f"{'step':14}{'result':26}{'seconds':>8}"]
    lines += [f"{name:14}{result:26}{seconds:8.1f}" for name, result, seconds in rows]
    n_passed = sum(result == "passed" for _, result, _ in rows)
    lines.append(f"{n_passed} of {len(rows)} steps passed; what each printed is in {logs}")
    print("\n".join(lines))
    (logs / "summary.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
