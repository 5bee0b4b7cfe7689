"""What asks `daskrun` to end reaches the scripts, which may save first."""

import os
import pty
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
from processes import has_ended
from test_command import BIN, command, of_rank, write
from waiting import GIVE_UP_S, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
SAVES = [
    "import signal, sys, time",
    "def save(number, _):",
    "    time.sleep(0.5)",
    "    sys.exit(print('saved after', signal.Signals(number).name))",
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, save)",
    "print('begun')",
    "time.sleep(1000)",
]
STAYS = [
    "import os, signal, time",
    "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda number, _: print('heard', number))",
    "print('begun', os.getpid())",
    "while True: time.sleep(1)",
]


def printed(folder, what):
    return (folder / ".out").read_text().count(what)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.weekly)])
def test_a_signal_reaches_the_scripts_which_may_save(client, tmp_path, name):
    write(tmp_path, *SAVES)
    with command(client, tmp_path, "script.py") as process:
        until(lambda: printed(tmp_path, "begun\n") == 2)
        process.send_signal(getattr(signal, name))
        assert process.wait(GIVE_UP_S) == 0
    assert printed(tmp_path, f"saved after {name}\n") == 2


def starts_late(seconds):
    """Have the processes of ranks start late on this worker, by so many seconds; 0 for as ever."""
    from daskrun.worker import process, rank

    class Late(process.Process):
        def __init__(self, *given):
            time.sleep(seconds)
            super().__init__(*given)

    rank.Process = Late if seconds else process.Process


def test_a_signal_reaches_a_script_that_starts_after_it(client, tmp_path):
    late = max(client.nthreads())
    write(tmp_path, *SAVES)
    client.run(starts_late, 4, workers=[late])
    with command(client, tmp_path, "--shutdown-timeout", 10 * GIVE_UP_S, "script.py") as process:
        until(lambda: printed(tmp_path, "begun\n") == 1)
        process.send_signal(signal.SIGTERM)
        process.wait(GIVE_UP_S)  # or it would wait for a script that nobody has told
    client.run(starts_late, 0, workers=[late])
    assert printed(tmp_path, "saved after SIGTERM\n") == 1


def test_sigterm_twice_does_not_disturb_a_script_that_saves(client, tmp_path):
    write(tmp_path, *SAVES[:2], "    time.sleep(2)", *SAVES[3:])
    with command(client, tmp_path, "script.py") as process:
        until(lambda: printed(tmp_path, "begun\n") == 2)
        for _ in range(3):  # as a batch system may
            process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0
    assert printed(tmp_path, "saved after SIGTERM\n") == 2


def test_a_second_ctrl_c_ends_scripts_at_once(client, tmp_path):
    write(tmp_path, *STAYS)
    with command(client, tmp_path, "--shutdown-timeout", 10 * GIVE_UP_S, "script.py") as process:
        until(lambda: printed(tmp_path, "begun") == 2)
        process.send_signal(signal.SIGINT)
        until(lambda: printed(tmp_path, f"heard {signal.SIGINT}") == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 1
    pids = [int(of_rank(rank, (tmp_path / ".out").read_text())[0].split()[1]) for rank in (0, 1)]
    until(lambda: all(map(has_ended, pids)))


def test_scripts_that_do_not_end_after_a_signal_are_killed_and_it_is_said(client, tmp_path):
    write(tmp_path, *STAYS)
    with command(client, tmp_path, "--shutdown-timeout", 1, "script.py") as process:
        until(lambda: printed(tmp_path, "begun") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 1
    assert "1 s after SIGTERM" in (tmp_path / ".err").read_text()


def test_who_stops_scripts_does_not_read_their_lines_twice(client, tmp_path):
    write(tmp_path, "import time", "print('begun')", "time.sleep(1000)")
    with command(client, tmp_path, "script.py") as process:
        until(lambda: printed(tmp_path, "begun\n") == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 1
    said = (tmp_path / ".err").read_text()
    assert said.count("KeyboardInterrupt") == 2
    assert said.endswith("\n\nStopped by SIGINT. script.py ended with SIGINT.\n")


def test_of_a_script_that_fails_as_it_is_stopped_the_rank_is_named(client, tmp_path):
    write(tmp_path, "import os, time", "print('begun')", "try: time.sleep(1000)", "except KeyboardInterrupt:")
    with (tmp_path / "script.py").open("a") as script:
        script.write("    if os.environ['RANK'] == '1': raise OSError('disk full') from None\n")
    with command(client, tmp_path, "script.py") as process:
        until(lambda: printed(tmp_path, "begun\n") == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 1
    said = (tmp_path / ".err").read_text()
    assert "[rank1]: OSError: disk full\n" in said and "From rank 1 of 2" in said
    assert said.endswith("Stopped by SIGINT. script.py ended with exit code 1.\n")


def test_the_others_of_a_rank_that_fails_may_save(client, tmp_path):
    write(tmp_path, "import os", "if os.environ['RANK'] == '1': raise SystemExit(3)", *SAVES)
    with command(client, tmp_path, "script.py") as process:
        assert process.wait(GIVE_UP_S) == 1
    assert printed(tmp_path, "saved after SIGTERM\n") == 1
    assert "script.py ended with exit code 3" in (tmp_path / ".err").read_text()


def test_a_script_that_a_failure_leaves_is_killed_after_the_time_it_has(client, tmp_path):
    write(tmp_path, "import os, time", "if os.environ['RANK'] == '1': time.sleep(3); raise SystemExit(3)", *STAYS)
    with command(client, tmp_path, "--shutdown-timeout", 1, "script.py") as process:
        assert process.wait(GIVE_UP_S) == 1
    said = of_rank(0, (tmp_path / ".out").read_text())
    assert said[1:] == [f"heard {signal.SIGTERM}"]
    until(lambda: has_ended(int(said[0].split()[1])))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_scripts_of_local_workers_may_save_when_the_terminal_is_gone(tmp_path):
    write(tmp_path, *SAVES[:3], "    open(f'saved{os.environ[\"RANK\"]}', 'w').write(str(number))", *SAVES[3:])
    write(tmp_path, "import os", *(tmp_path / "script.py").read_text().splitlines())
    ours, theirs = pty.openpty()
    process = subprocess.Popen(  # setsid --ctty: the terminal is that of the process, as a shell's
        ["setsid", "--ctty", "--wait", BIN / "daskrun", "-n", "2", "script.py"],
        cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def begun():
        nonlocal shown
        shown += os.read(ours, 1000)
        return shown.count(b"begun") == 2

    until(begun)
    os.close(ours)
    until(lambda: all((tmp_path / f"saved{rank}").exists() for rank in (0, 1)))
    assert {(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)} == {str(int(signal.SIGHUP))}
    process.wait(GIVE_UP_S)


def test_scripts_of_local_workers_may_save_when_sigterm_goes_to_the_whole_process_group(tmp_path):
    as_alone = "print('as alone:', signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"  # so that its children end
    write(tmp_path, "import signal", as_alone, *SAVES)
    with (tmp_path / ".out").open("w") as out, (tmp_path / ".err").open("w") as err:
        process = subprocess.Popen(  # as from timeout, or Slurm
            [BIN / "daskrun", "-n", "2", "script.py"], cwd=tmp_path, stdout=out, stderr=err, start_new_session=True
        )
        until(lambda: printed(tmp_path, "begun\n") == 2)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0, (tmp_path / ".err").read_text()
    assert printed(tmp_path, "saved after SIGTERM\n") == 2
    assert printed(tmp_path, "as alone: True\n") == 2


def test_a_signal_while_workers_start_leaves_no_semaphore(tmp_path):
    write(tmp_path, "print('begun')")
    process = subprocess.Popen(
        [BIN / "daskrun", "-n", "2", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=GIVE_UP_S)
    assert process.returncode == 1
    assert "leaked" not in said + err and "Traceback" not in err


def print_much_and_save(folder, saves=True):
    write(
        folder,
        "import os, pathlib, signal, sys",
        "import torch.distributed as dist",
        "rank = os.environ['RANK']",
        "save = lambda *_: sys.exit(pathlib.Path('saved' + rank).touch())",
        f"signal.signal(signal.SIGTERM, save if {saves} else signal.SIG_DFL)",
        "dist.init_process_group('gloo')",
        "dist.barrier()  # both are ready for the signal",
        "while True: print('x' * 1000)",
    )


def have_saved(folder):
    return [(folder / f"saved{rank}").exists() for rank in (0, 1)]


@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.weekly)])
def test_scripts_end_when_nobody_reads_the_output_any_more_and_may_save(client, tmp_path, saves):
    print_much_and_save(tmp_path, saves)
    line = [BIN / "daskrun", "--scheduler", client.scheduler.address, "--wait-for-workers", str(GIVE_UP_S), "script.py"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert "Broken pipe" in process.stderr.read() and process.wait(GIVE_UP_S) == 1
    assert have_saved(tmp_path) == [saves, saves]
