"""The command `daskrun` runs scripts for torchrun, and what the launcher promises holds for them."""

import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from processes import dask_process, has_ended
from waiting import GIVE_UP_S, until

from daskrun import ClusterError, reach
from daskrun.command import main
from daskrun.settings import GPU_DEVICES

BIN = Path(sys.executable).parent
README = Path(__file__).parents[1] / "README.md"
SCRIPTS = Path(__file__).with_name("scripts")


@contextmanager
def command(client, folder, *words):
    """Start `daskrun` on the client's cluster; it does not outlive the block."""
    line = [BIN / "daskrun", "--scheduler", client.scheduler.address, "--wait-for-workers", GIVE_UP_S, *words]
    out, err = (folder / ".out").open("w+"), (folder / ".err").open("w+")
    process = subprocess.Popen(list(map(str, line)), cwd=folder, stdout=out, stderr=err)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        out.close()
        err.close()


def run(client, folder, *words):
    """Return (exit code, what it printed, what it printed as errors)."""
    with command(client, folder, *words) as process:
        code = process.wait(GIVE_UP_S)
    return code, (folder / ".out").read_text(errors="surrogateescape"), (folder / ".err").read_text()


def write(folder, *lines):
    (folder / "script.py").write_text("\n".join(lines) + "\n")


def of_rank(rank, out):
    return [line.removeprefix(f"[rank{rank}]: ") for line in out.splitlines() if line.startswith(f"[rank{rank}]: ")]


@pytest.mark.smoke
def test_a_script_computes_what_it_computes_under_torchrun(client, tmp_path):
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / "config.py").write_text("n_epochs = 1")
    code, out, err = run(client, tmp_path, "as_real_ones_do.py", "config.py")
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "as_real_ones_do.py", "config.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S)
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stderr
    assert sorted(of_rank(0, out) + of_rank(1, out)) == sorted(lines)
    assert (code, done.returncode) == (1, 1)
    assert "as_real_ones_do.py ended with exit code 3" in err


def test_a_script_finds_torchruns_local_ranks(client, tmp_path):
    write(
        tmp_path,
        "import os",
        "names = 'RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK WORLD_SIZE'.split()",
        "print(' '.join(f'{name}={os.environ.get(name)}' for name in names) + '\\n', end='')",
    )
    code, out, err = run(client, tmp_path, "script.py")
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S)
    assert sorted(of_rank(0, out) + of_rank(1, out)) == sorted(done.stdout.splitlines()), done.stderr + err
    assert "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1" in out
    _, out, _ = run(client, tmp_path, "--virtual-local-rank", "script.py")
    assert of_rank(1, out) == [
        "RANK=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=1 WORLD_SIZE=2"
    ]


def set_variable(name, value):
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


@pytest.mark.parametrize(
    ("of_workers", "of_scripts"),
    [
        (["1,0", "0,1"], ["1,0", "1,0"]),  # as workers of dask-cuda, each with its own first
        (["1,2,0", " 0,2,1"], ["1,0,2", "1,0,2"]),
        (["3", "2"], ["3,2", "3,2"]),
        (["0,1", "0,1"], ["0,1", "0,1"]),
        (["0", "-1"], ["0", "-1"]),
        (["", ""], ["", ""]),
        (["0", ""], ["0", ""]),
    ],
)
def test_a_scripts_own_gpu_is_the_one_of_its_local_rank(client, tmp_path, of_workers, of_scripts):
    write(tmp_path, "import os", "print(os.environ.get('CUDA_VISIBLE_DEVICES', ''))")
    workers = sorted(client.nthreads(), key=lambda address: client.scheduler_info()["workers"][address]["name"])
    for worker, seen in zip(workers, of_workers, strict=True):
        client.run(set_variable, "CUDA_VISIBLE_DEVICES", seen, workers=[worker])
    try:
        _, out, err = run(client, tmp_path, "script.py")
    finally:
        client.run(set_variable, "CUDA_VISIBLE_DEVICES", None)
    assert [of_rank(rank, out) for rank in (0, 1)] == [[seen] for seen in of_scripts], err


def test_a_script_without_a_gpu_of_its_local_rank_is_told_the_option(client, tmp_path):
    write(tmp_path, "import os", "print(os.environ['LOCAL_RANK'])")
    client.run(set_variable, "CUDA_VISIBLE_DEVICES", "0")  # as in two jobs of Slurm on one node
    try:
        code, _, err = run(client, tmp_path, "script.py")
        assert code == 1 and "LOCAL_RANK 1" in err and "virtual_local_rank" in err
        code, out, _ = run(client, tmp_path, "--virtual-local-rank", "script.py")
        assert code == 0 and of_rank(1, out) == ["0"]
        code, out, _ = run(client, tmp_path, "-n", "1", "script.py")
        assert code == 0 and of_rank(0, out) == ["0"]
    finally:
        client.run(set_variable, "CUDA_VISIBLE_DEVICES", None)


def test_the_example_of_the_readme_prints_what_stands_there(tmp_path):
    example = re.search(r"```python\n(import argparse.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(example[1])
    command = re.search(r"^daskrun (.*?)  ", README.read_text(), re.MULTILINE)[1].split()
    done = subprocess.run([BIN / "daskrun", *command], cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S)
    assert sorted(done.stdout.splitlines()) == sorted(example[2].splitlines()), done.stderr


@pytest.mark.skipif(any(map(os.path.exists, GPU_DEVICES)), reason="PyTorch is asked about this machine's GPU")
def test_the_command_itself_imports_no_pytorch_which_takes_seconds(tmp_path):
    write(tmp_path, "print('hello')")
    program = (
        "import atexit, sys; from daskrun.command import main\n"
        "atexit.register(lambda: print('torch' in sys.modules)); main(['-n', '1', 'script.py'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S
    )
    assert done.stdout == "[rank0]: hello\nFalse\n", done.stderr


def test_of_two_numbers_the_larger_one_is_started_here(tmp_path):
    write(tmp_path, "import os", "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    command = [BIN / "daskrun", "-n", "1:2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S)
    assert sorted(done.stdout.splitlines()) == ["[rank0]: 0 of 2", "[rank1]: 1 of 2"], done.stderr


def test_a_folder_for_logs_that_cannot_be_written_is_told_before_workers_start(tmp_path):
    (tmp_path / "file").touch()
    write(tmp_path, "")
    command = [BIN / "daskrun", "--standalone", "--log-dir", "file/logs", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S)
    assert (done.returncode, done.stdout) == (1, "") and "'file/logs'" in done.stderr and "Starting" not in done.stderr


def test_the_last_lines_before_a_death_arrive_and_the_job_starts_again(client, tmp_path):
    write(
        tmp_path,
        "import os, sys, time",
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']",
        "for number in range(1000): print(attempt, number, 'ä')",
        "sys.stdout.write('bar 1\\rbar 2\\rbar 3')",
        "if attempt == '0': os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(1000)",
    )
    code, out, err = run(client, tmp_path, "--max-restarts", 1, "--log-dir", "logs/of", "script.py")
    said = [[*(f"{attempt} {number} ä" for number in range(1000)), "bar 3"] for attempt in (0, 1)]
    assert of_rank(1, out) == sum(said, [])
    logged = re.split(r"--- attempt \d, .* ---\n", (tmp_path / "logs/of/rank1.log").read_text())
    assert [part.splitlines() for part in logged] == [[], *said]
    assert re.search(r"Rank 1 died: .* signal 9 \(SIGKILL\)", err) and "Starting again (1 of max_restarts=1)" in err
    assert "Where each rank is: http://127.0.0.1:" in err  # also of a cluster that was joined
    assert code == 0


def test_a_rank_that_is_killed_with_its_dataloader_leaves_nothing_and_prints_nothing(client, tmp_path):
    write(
        tmp_path,
        "import os, torch",
        "for _ in torch.utils.data.DataLoader(torch.arange(8), num_workers=2):",
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)",
        "print('done')",
    )
    before = set(os.listdir("/dev/shm"))
    code, out, err = run(client, tmp_path, "-n", 1, "--max-restarts", 1, "script.py")
    assert (code, of_rank(0, out), of_rank(0, err)) == (0, ["done"], [])
    until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("sem.", "torch"))})


def test_scripts_go_on_where_a_file_of_their_output_cannot_be_written(client, tmp_path):
    write(tmp_path, "import time", "for _ in range(3): print('line'), time.sleep(0.2)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank1.log").symlink_to("/dev/full")
    code, out, err = run(client, tmp_path, "--log-dir", "logs", "script.py")
    assert code == 0 and err.count("--log-dir") == 1 and out.count("line") == 6


def test_a_failed_ranks_traceback_comes_last_as_python_prints_it(client, tmp_path):
    write(
        tmp_path,
        "import os, runpy, time",
        "if os.environ['RANK'] == '0': time.sleep(1000)",
        "runpy.run_path('inner.py')",
    )
    (tmp_path / "inner.py").write_text("raise ValueError('no')")
    code, _, err = run(client, tmp_path, "script.py")
    environment = {**os.environ, "RANK": "1"}
    alone = subprocess.run([sys.executable, tmp_path / "script.py"], cwd=tmp_path, env=environment, capture_output=True)
    assert err.endswith(f"script.py ended with exit code 1. Its last lines:\n\n{alone.stderr.decode()}")
    assert code == 1


def test_what_a_script_opens_where_our_pipes_were_stays_as_it_is(client, tmp_path):
    write(
        tmp_path,
        "import daskrun, os",
        "os.closerange(3, 100)",
        "files = [open(f'file{n}' + os.environ['RANK'], 'w') for n in range(100)]",
        "daskrun.log_metrics(loss=1)",
        "raise ValueError('no')",
    )
    assert run(client, tmp_path, "script.py")[0] == 1
    assert sum(file.stat().st_size for file in tmp_path.glob("file*")) == 0


@pytest.mark.weekly
def test_an_abort_is_a_death_also_after_an_error_that_was_handled_and_in_a_childs_script(client, tmp_path):
    write(
        tmp_path,
        "import logging, os, sys, time",
        "if os.environ['RANK'] == '0': time.sleep(1000)",
        "if not (child := os.fork()): sys.exit(3)  # as of the script's own code",
        "os.waitpid(child, 0)",
        "try: 1 / 0",
        "except ZeroDivisionError: logging.exception('skipped')",
        "print('terminate called without an active exception', file=sys.stderr)",
        "os.abort()",
    )
    end, _, err = run(client, tmp_path, "--max-restarts", 1, "script.py")
    assert err.count("killed by signal 6 (SIGABRT)") == 2 and "Starting again" in err
    assert end == 1


@pytest.mark.timing  # a second is given to the rank that failed first
@pytest.mark.parametrize("ends", ["raise", pytest.param("os.abort()", marks=pytest.mark.weekly)])
def test_the_rank_that_failed_first_is_told_where_its_end_breaks_the_others_communication(client, tmp_path, ends):
    write(
        tmp_path,
        "import os, subprocess, time, torch, torch.distributed as dist",
        "dist.init_process_group('gloo')",
        "if dist.get_rank() == 0:",
        "    subprocess.Popen(['sleep', '20'], start_new_session=True)  # which holds the output open",
        "    print('the cause')",
        "    dist.destroy_process_group()",
        "    time.sleep(0.3)",
        "    os._exit(1)",
        "try: dist.all_reduce(torch.ones(1))",
        f"except RuntimeError: {ends}",
    )
    code, _, err = run(client, tmp_path, "--max-restarts", 1, "script.py")
    assert err.endswith("the cause\n")
    assert code == 1


def test_a_program_that_starts_a_cluster_is_no_script_for_ranks(client, tmp_path):
    write(tmp_path, "import daskrun", "daskrun.start_local(1)")
    code, _, err = run(client, tmp_path, "script.py")
    assert "start_local was called in a rank" in err
    assert code == 1


def test_a_child_of_the_script_may_log_no_row(client, tmp_path):
    write(
        tmp_path,
        "import multiprocessing, daskrun",
        "def log():",
        "    try: daskrun.log_metrics(loss=1)",
        "    except ValueError as error: print('refused')",
        "if __name__ == '__main__':",
        "    for kind in ('fork', 'spawn'):",
        "        child = multiprocessing.get_context(kind).Process(target=log)",
        "        child.start()",
        "        child.join()",
    )
    _, out, err = run(client, tmp_path, "script.py")
    assert of_rank(0, out) == of_rank(1, out) == ["refused", "refused"], err


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_a_child_returns_what_the_script_has_defined(client, tmp_path, words):
    write(
        tmp_path,
        "import atexit, multiprocessing, pickle",
        "class Dog: name = 'Rex'",
        "def dog(_): return Dog()",
        "if __name__ == '__main__':",
        "    for kind in ('fork', 'spawn'):",
        "        with multiprocessing.get_context(kind).Pool(1) as pool: print(pool.map(dog, [1])[0].name)",
        "    atexit.register(lambda: print(pickle.loads(pickle.dumps(Dog())).name))",
    )
    _, out, err = run(client, tmp_path, *words)
    assert of_rank(0, out) == of_rank(1, out) == ["Rex"] * 3, err


def test_a_script_may_leave_shared_memory_to_multiprocessing(client, tmp_path):
    write(
        tmp_path,
        "from multiprocessing.shared_memory import SharedMemory",
        "print(SharedMemory(create=True, size=8).name)",
    )
    _, out, err = run(client, tmp_path, "script.py")
    names = [of_rank(rank, out)[0] for rank in (0, 1)]
    until(lambda: not any(Path("/dev/shm", name).exists() for name in names))


def test_what_a_script_leaves_behind_ends_with_it(client, tmp_path):
    write(
        tmp_path,
        "import subprocess, sys",
        "left = subprocess.Popen([sys.executable, '-c', 'while True: print(1)'])",
        "print('pid', left.pid)",
    )
    code, out, _ = run(client, tmp_path, "script.py")
    pids = [int(line.split()[1]) for rank in (0, 1) for line in of_rank(rank, out) if line.startswith("pid")]
    assert len(pids) == 2
    until(lambda: all(map(has_ended, pids)))
    assert code == 0


def test_a_death_after_sigterm_is_answered_by_no_other_start(client, tmp_path):
    write(
        tmp_path,
        "import os, signal, time",
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), 9))",
        "print('begun')",
        "time.sleep(1000)",
    )
    with command(client, tmp_path, "--max-restarts", 3, "script.py") as process:
        until(lambda: (tmp_path / ".out").read_text().count("begun") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 1
    assert (tmp_path / ".out").read_text().count("begun") == 2


def test_sigterm_beside_a_workers_death_ends_with_what_ended_a_rank(client, tmp_path):
    write(tmp_path, "import time", "print('begun')", "time.sleep(1000)")
    with command(client, tmp_path, "--max-restarts", 3, "script.py") as process:
        until(lambda: len((tmp_path / ".out").read_text().splitlines()) == 2)
        os.kill(max(client.run(os.getpid).values()), signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 1
    assert " died" in (tmp_path / ".err").read_text() or "SIGTERM" in (tmp_path / ".err").read_text()


def test_a_hang_is_explained_and_ctrl_c_ends_the_ranks(client, tmp_path):
    write(
        tmp_path,
        "import os, time, torch, torch.distributed as dist",
        "dist.init_process_group('gloo')",
        "child = os.fork() or time.sleep(1000)",
        "print(os.getpid(), child)",
        "if dist.get_rank() == 0: time.sleep(1000)",
        "dist.all_reduce(torch.ones(10))",
    )
    with command(client, tmp_path, "--stall-after", 1, "script.py") as process:
        waits = "Rank 1 waits in all_reduce (collective 1, shape [10]), at script.py:6 in <module>, in all_reduce. "
        until(lambda: waits + "Rank 0 has not called it: it is at script.py:5" in (tmp_path / ".err").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 1
    printed = (tmp_path / ".out").read_text()
    pids = [int(pid) for rank in (0, 1) for pid in of_rank(rank, printed)[0].split()]
    until(lambda: all(map(has_ended, pids)))


def test_a_script_finds_the_modules_that_it_finds_under_python(client, tmp_path):
    for name in ("tornado", "hidden"):
        (tmp_path / f"{name}.py").write_text(f'print("own {name}")')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hidden.py").rename(tmp_path / "elsewhere" / "hidden.py")
    (tmp_path / "paths.py").write_text("import sys; sys.path.append('elsewhere')")
    write(tmp_path, "import sys, tornado, paths, hidden", "print(sys.argv)")
    (tmp_path / "call").mkdir()
    (tmp_path / "call" / "linked.py").symlink_to(tmp_path / "script.py")
    (tmp_path / "call" / "elsewhere").symlink_to(tmp_path / "elsewhere")
    code, out, err = run(client, tmp_path / "call", "linked.py", "x")
    for rank in (0, 1):
        assert of_rank(rank, out) == ["own tornado", "own hidden", "['linked.py', 'x']"], err
    assert code == 0


@pytest.mark.parametrize(
    ("dies", "ends"), [("os.kill(os.getpid(), 15)", "SIGTERM"), ("print('x' * 300)", "exit code 1")]
)
def test_an_end_that_is_no_death_keeps_the_worker_and_its_last_lines(client, tmp_path, dies, ends):
    write(
        tmp_path,
        "import os, time",
        "if os.environ['RANK'] == '0': time.sleep(1000)",
        f"for _ in range(50): {dies}",
        "raise OSError('no')",
    )
    code, _, err = run(client, tmp_path, "script.py")
    assert f"script.py ended with {ends}." in err
    assert ends == "SIGTERM" or (". Its last lines:\n\n" in err and err.endswith("OSError: no\n"))
    assert code == 1


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (["nowhere.py"], "no file {0}/nowhere.py on worker tcp"),
        (["script.py"], "ModuleNotFoundError: No module named 'nowhere'"),
        (["-m", "nowhere"], "No module named nowhere"),
    ],
)
def test_what_a_worker_lacks_is_named_with_the_worker(client, tmp_path, words, lacking):
    write(tmp_path, "import nowhere.module")
    code, _, err = run(client, tmp_path, *words)
    assert re.search(r"rank [01] of 2, on worker tcp://127.0.0.1:", err), err
    assert lacking.format(tmp_path) in err
    assert code == 1


def test_a_crash_is_told_with_the_last_lines(client, tmp_path):
    write(
        tmp_path, "import os, time", "if os.environ['RANK'] == '0': time.sleep(1000)", "print('reason')", "os.abort()"
    )
    code, _, err = run(client, tmp_path, "script.py")
    assert re.search(r"Rank 1 died: .* signal 6 \(SIGABRT\).*\n\nreason\n$", err), err
    assert code == 1


def test_a_job_whose_tasks_others_cancel_ends_with_a_sentence(client, tmp_path):
    write(tmp_path, "import time", "print('begun')", "time.sleep(1000)")
    with command(client, tmp_path, "script.py") as process:
        until(lambda: (tmp_path / ".out").read_text().count("begun") == 2)
        client.restart()
        assert process.wait(GIVE_UP_S) == 1
    assert "Traceback" not in (tmp_path / ".err").read_text()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["-n", "3", "--wait-for-workers", "0"], "needs 3 workers"),
        (["-n", "0"], "n_workers is 0"),
        ([], "\nmax_restarts.py ended with exit code 3."),
    ],
)
def test_an_error_says_what_is_wrong(client, tmp_path, words, names):
    (tmp_path / "max_restarts.py").write_text("raise SystemExit(3)")
    code, _, err = run(client, tmp_path, *words, "max_restarts.py")
    assert names in err
    assert code == 1


def test_a_scripts_folder_can_be_sent_along(client, tmp_path):
    sent = tmp_path / "sent"
    (sent / "package").mkdir(parents=True)
    (sent / "package" / "__init__.py").touch()
    (sent / "package" / "train.py").write_text(
        "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(os.listdir()), sep=';')"
    )
    (sent / ".hidden").touch()
    (sent / "link").symlink_to("nowhere")
    write(sent, "from package import train")
    for words, folder in [(["sent/script.py"], tmp_path), (["-m", "package.train"], sent)]:
        code, out, _ = run(client, folder, "--ship", *words, "--epochs", "3")
        for rank in (0, 1):
            (said,) = of_rank(rank, out)
            arguments, where, files = said.split(";")
            assert (arguments, files) == ("['--epochs', '3']", "['package', 'script.py']")
            assert Path(where) not in (folder, sent)
        assert code == 0


def test_a_folder_too_large_to_send_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("daskrun.script.MOST_SHIPPED", 10)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "print('hello')")
    done = CliRunner().invoke(main, ["--ship", "script.py"])
    assert done.exit_code == 1
    assert "ship a folder of code alone" in done.output


def test_a_file_without_a_schedulers_address_is_named(tmp_path):
    (tmp_path / "scheduler.json").write_text("{}")
    done = CliRunner().invoke(main, ["--scheduler-file", str(tmp_path / "scheduler.json"), "script.py"])
    assert f"{tmp_path}/scheduler.json holds no scheduler's address" in done.output
    assert done.exit_code == 1


def test_what_listens_but_is_no_scheduler_is_told_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("daskrun.command.ANSWER_S", 1)
    write(tmp_path, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        done = CliRunner().invoke(main, ["--scheduler", address, str(tmp_path / "script.py")])
    assert re.search(f"No Dask scheduler answered at '{address}' .*not the dashboard's", done.output)
    assert done.exit_code == 1


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(64)])
def test_what_answers_and_is_no_scheduler_is_named(said):
    class Other(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(said)
            self.request.recv(1)

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        address = f"tcp://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ClusterError, match=f"No Dask scheduler answered at '{address}'"):
            reach(address, GIVE_UP_S)


def test_a_cluster_without_a_dashboard_has_no_address_of_one(tmp_path):
    write(tmp_path, "")
    file = tmp_path / "scheduler.json"
    with dask_process("scheduler", "--scheduler-file", file, "--port", 0, folder=tmp_path):
        until(file.exists)
        done = CliRunner().invoke(main, ["-n", "1", "--scheduler-file", str(file), str(tmp_path / "script.py")])
    assert "needs 1 or more" in done.output and "Where each rank is" not in done.output, done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes", "2"], "each Dask worker is a rank"),
        (["--node-rank", "1"], "where they meet"),
        (["--no-python"], "No such option"),
        (["--env", "NOWHERE_SET"], "write --env NOWHERE_SET=VALUE"),
        (["--env", "RANK=3"], "ranks get RANK from daskrun"),
        (["-n", "two"], "'two' is neither a number of ranks nor two, such as 2:8"),
        (["--scheduler-file", "nowhere"], "does not exist"),
        (["--nowhere", "3"], "Options of the script follow its name"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(words, says):
    done = CliRunner().invoke(main, [*words, "script.py"])
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv_backend=c10d", "--rdzv-id", "1"],
        ["--master-port", "29500"],
        ["--nnodes", "1"],
        ["-t", "3"],
        ["--redirects", "0"],
        ["--role", "default"],
    ],
)
def test_what_only_torchrun_needs_is_noted_and_changes_nothing(words):
    done = CliRunner().invoke(main, [*words, "--scheduler-file", "nowhere", "script.py"])
    assert "changes nothing: " in done.output
    assert "nowhere" in done.output


def test_python_m_daskrun_is_the_command():
    done = subprocess.run([sys.executable, "-m", "daskrun", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("daskrun, version ")


def test_scripts_get_the_callers_variables_that_are_named(client, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_SHELL", "here")
    client.run(set_variable, "GIVEN", "the worker's")
    write(tmp_path, "import os", "print(*map(os.environ.get, ['OF_THE_SHELL', 'GIVEN', 'PYTHONHASHSEED']))")
    _, out, err = run(client, tmp_path, "--env", "OF_THE_SHELL", "--env", "GIVEN=a=b", "script.py")
    assert of_rank(0, out) == of_rank(1, out) == ["here a=b None"], err
    client.run(set_variable, "GIVEN", None)
    _, out, _ = run(client, tmp_path, "--env", "PYTHONHASHSEED=6640", "script.py")
    assert of_rank(1, out) == ["None None 6640"]


def test_output_keeps_its_stream_and_what_has_no_end_of_line_is_shown(client, tmp_path):
    write(
        tmp_path,
        "import sys, time",
        "print('error', file=sys.stderr)",
        "sys.stdout.buffer.write(b'\\xc3')",
        "time.sleep(0.3)",
        "sys.stdout.buffer.write(b'\\xa4 \\x1b[31mred\\x1b[0m\\r\\nloading\\n\\n')",
        "print('waits for', end='')",
        "while not __import__('os').path.exists('go'): time.sleep(0.1)",
        "print(' you')",
    )
    with command(client, tmp_path, "script.py") as process:
        until(lambda: (tmp_path / ".out").read_text().count("waits for\n") == 2)
        (tmp_path / "go").touch()
        assert process.wait(GIVE_UP_S) == 0
    for rank in (0, 1):
        assert of_rank(rank, (tmp_path / ".out").read_text()) == [
            "ä \x1b[31mred\x1b[0m",
            "loading",
            "",
            "waits for",
            " you",
        ]
        assert of_rank(rank, (tmp_path / ".err").read_text()) == ["error"]


def test_a_script_looks_as_under_python_from_inside_and_by_ps(client, tmp_path):
    write(
        tmp_path,
        "import __main__, os, psutil, sys",
        "print(__main__.__loader__.get_source('__main__') == open(__file__).read(), sys.argv, __main__.__spec__)",
        "print(psutil.Process().name())",
        "print(repr(sys.stdin.read()))",
    )
    _, out, err = run(client, tmp_path, "script.py", "--secret")
    for rank in (0, 1):
        assert of_rank(rank, out) == ["True ['script.py', '--secret'] None", f"rank {rank}", "''"], err


@pytest.mark.parametrize("options", [(), ("--start-method", "spawn")])
def test_a_script_finds_what_it_finds_under_python_and_torchrun(client, tmp_path, options):
    write(
        tmp_path,
        "import inspect, json, os, sys, warnings",
        "names = sorted(name for name in globals() if name.startswith('__'))",
        "warnings.simplefilter('default')",
        "with warnings.catch_warnings(record=True) as seen:",
        "    warnings.resetwarnings()",
        "    warnings.filterwarnings('default', category=DeprecationWarning, module='__main__')",
        "    warnings.filterwarnings('ignore', category=DeprecationWarning)",
        "    warnings.warn('of who called', DeprecationWarning, stacklevel=2)",
        "own = [frame.filename for frame in inspect.stack() if frame.filename.startswith(('/', '<frozen'))]",
        "variables = sorted(name for name in os.environ if name.startswith('TORCH'))",
        "level = os.environ.get('TORCH_CPP_LOG_LEVEL')",
        "print(json.dumps([names, len(seen), own == [__file__], variables, level, __annotations__]))",
        "os.write(1, b'raw \\xff\\n')",
    )
    _, out, err = run(client, tmp_path, *options, "--env", "TORCH_CPP_LOG_LEVEL=WARNING", "-n", 1, "script.py")
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, timeout=GIVE_UP_S)
    *under_torchrun, level, annotations = json.loads(done.stdout.splitlines()[0])
    *ours, _, our_annotations = json.loads(of_rank(0, out)[0])
    assert ours[:3] == under_torchrun[:3] and our_annotations == annotations == {}, err
    assert set(ours[3]) - set(under_torchrun[3]) == {"TORCH_CPP_LOG_LEVEL", "TORCH_FR_BUFFER_SIZE"} and level is None
    assert set(under_torchrun[3]) <= set(ours[3])
    assert of_rank(0, out)[1].encode(errors="surrogateescape") == b"raw \xff"


def test_pytorchs_warnings_are_printed_by_a_script_of_local_workers_and_each_line_names_its_rank_once(tmp_path):
    write(
        tmp_path,
        "import os, sys",
        "print(os.environ.get('TORCH_CPP_LOG_LEVEL'))",
        "sys.stderr.write('[rank0]:[W1130 reducer.cpp] Warning\\n[rank0]: Traceback\\n')",
    )
    done = subprocess.run([BIN / "daskrun", "-n", "1", "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert of_rank(0, done.stdout) == ["None"]
    assert of_rank(0, done.stderr) == ["[W1130 reducer.cpp] Warning", "Traceback"]


def test_record_writes_the_error_of_a_script_where_torchruns_variable_says(client, tmp_path):
    write(
        tmp_path,
        "import atexit, os",
        "from torch.distributed.elastic.multiprocessing.errors import record",
        "atexit.register(lambda: print(os.path.getsize(os.environ['TORCHELASTIC_ERROR_FILE']) > 0))",
        "@record",
        "def main():",
        "    raise ValueError('mine')",
        "main()",
    )
    _, out, err = run(client, tmp_path, "-n", 1, "script.py")
    assert of_rank(0, out) == ["True"], err


@pytest.mark.parametrize(
    "lines",
    [
        ["from lightning.fabric import Fabric", "made = Fabric()"],
        ["from lightning import Trainer", "made = Trainer(logger=False, enable_checkpointing=False)"],
        ["from accelerate import Accelerator", "made = Accelerator()", "made.world_size = made.num_processes"],
    ],
)
def test_what_would_train_alone_on_each_rank_trains_on_all(client, tmp_path, lines):
    write(tmp_path, *lines, "print('world', made.world_size)")
    _, out, err = run(client, tmp_path, "script.py")
    assert "world 2" in of_rank(0, out) and "world 2" in of_rank(1, out), err


def test_a_short_progress_bar_is_shown_once(client, tmp_path):
    write(
        tmp_path,
        "import sys, time",
        "for done in range(8):",
        "    sys.stderr.write(f'\\r{done}/7')",
        "    time.sleep(0.2)",
        "sys.stderr.write('\\n')",
    )
    _, _, err = run(client, tmp_path, "script.py")
    assert of_rank(0, err) == of_rank(1, err) == ["7/7"]


def test_no_text_is_lost_after_a_progress_bar(client, tmp_path):
    write(
        tmp_path,
        "import sys, time",
        "for text in ('10%\\r', '20%\\r', 'saving ... '): sys.stdout.write(text)",
        "time.sleep(1.5)",
        "sys.stdout.write('saved\\n\\rhalf' + 'J' * 200_000 + '\\r\\r\\nend\\r')",
    )
    _, out, err = run(client, tmp_path, "script.py")
    assert of_rank(1, out) == ["saving ... saved", "half" + "J" * 200_000, "end"], err


def test_a_filter_of_the_output_may_finish(client, tmp_path):
    write(
        tmp_path,
        "import os, subprocess, sys",
        "filter = subprocess.Popen(['tee', '/dev/null'], stdin=subprocess.PIPE)",
        "os.dup2(filter.stdin.fileno(), 1)",
        "for number in range(20_000): print('line', number)",
        "sys.stdout.flush()",
        "os._exit(0)",
    )
    _, out, err = run(client, tmp_path, "script.py")
    assert of_rank(0, out) == of_rank(1, out) == [f"line {number}" for number in range(20_000)], err


def test_threads_by_env_are_those_that_pytorch_takes(client, tmp_path):
    write(tmp_path, "import torch", "print(torch.get_num_threads())")
    _, out, err = run(client, tmp_path, "--env", f"OMP_NUM_THREADS={os.cpu_count()}", "script.py")
    assert of_rank(0, out) == of_rank(1, out) == [str(os.cpu_count())], err


@pytest.mark.skipif(sys.platform != "linux", reason="by prctl")
def test_what_a_script_has_become_ends_with_its_worker(client, tmp_path):
    write(tmp_path, "import os", "print(os.getpid())", "os.execvp('sleep', ['sleep', '1000'])")
    with command(client, tmp_path, "-n", 1, "script.py") as process:
        until(lambda: "rank0" in (tmp_path / ".out").read_text())
        script = int(of_rank(0, (tmp_path / ".out").read_text())[0])
        until(lambda: psutil.Process(script).name() == "sleep")
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        assert process.wait(GIVE_UP_S) == 1
        until(lambda: has_ended(script))
