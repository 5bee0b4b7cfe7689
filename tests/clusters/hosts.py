"""Several hosts on this machine: each has its own network, name, processes and disk; they meet at one switch.

A host is a set of Linux namespaces, held by a first process that dies with this one, however this one ends. What the
host ran, mounted and plugged in goes with it, so that nothing has to be tidied up. This process has a port at the
switch, too: it is the client's machine.
"""

import importlib.metadata
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT}:{ROOT}/daskrun/src"  # this checkout's packages, whichever are installed
PREFIX, BASE = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
PROGRAMS = ("setpriv", "unshare", "nsenter", "ip")
DIE_WITH_US = "setpriv", "--pdeathsig=KILL"
ISOLATED = *DIE_WITH_US, "unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"
STAY = "echo ready; exec sleep infinity"
SWITCH = f"""
ip link set lo up
ip link add switch type bridge
ip addr add {{gateway}}/24 dev switch
ip link set switch up
echo 1 > /proc/sys/net/ipv4/ip_forward
ip route add unreachable default  # there is no internet, and who asks for it is told so at once
{STAY}
"""
# As many machines, it has a second network of the same address as everyone's, on which nobody is.
HOST = f"""
hostname {{name}}
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
{{hide}}
echo '127.0.0.1 localhost {{known}}' > /tmp/hosts
: > /tmp/resolv.conf
for file in hosts resolv.conf; do mount --bind /tmp/$file /etc/$file; done
mount -o remount,bind,ro /
{STAY}
"""
USER, BUCKET = "hosts", "workshop"
# After how many seconds of silence a connection counts as lost: Dask's default is 30, and less than 11 it refuses.
SILENCE_S = 11


def missing():
    """Return why there can be no hosts here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make hosts of namespaces"
    if lacking := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"needs {', '.join(lacking)}: apt install iproute2 util-linux"
    made = subprocess.run([*ISOLATED, "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, text=True)
    return f"no namespaces can be made here: {made.stderr}" if made.returncode else None


class Host:
    """What `Network.plug_in` returns.

    pid: of the first process. port: the name of its place at the switch. variables: the environment of what it runs.
    """

    def __init__(self, name, address, pid, port, at_switch, log):
        self.name, self.address, self.port, self.at_switch, self.log = name, address, port, at_switch, log
        self.enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--pid"]
        path = f"{PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.variables = {
            "HOME": str(Path.home()),
            "WORKSHOP_CACHE": str(Path.home() / "cache"),
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": "",
        }

    def command(self, *words, **variables):
        """Return the words that run a command on this host, in its home folder."""
        settings = [f"{name}={value}" for name, value in (self.variables | variables).items()]
        return [*self.enter, "env", "-i", f"--chdir={Path.home()}", *settings, *map(str, words)]

    def start(self, *words, **variables):
        """Start a command in a process group of its own, with its output in the log; return the Popen."""
        with open(self.log, "a") as log:
            return subprocess.Popen(
                self.command(*words, **variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *words, **how):
        """Return what a command prints."""
        done = subprocess.run(self.command(*words), text=True, capture_output=True, timeout=60, **how)
        assert done.returncode == 0, f"{self.name}: {shlex.join(map(str, words))}\n{done.stdout}{done.stderr}"
        return done.stdout

    def cut_off(self):
        """Take its cable out of the switch."""
        self.at_switch("ip", "link", "set", self.port, "down")

    def reconnect(self):
        """Put its cable back."""
        self.at_switch("ip", "link", "set", self.port, "up")


class Network:
    """What `network` yields. log: what its hosts' commands print. hosts: those that are plugged in, by name."""

    def __init__(self, folder):
        self.log, self.hosts, self._stack, self._n_ports = folder / "hosts.log", {}, ExitStack(), 0
        self.log.touch()

    def __enter__(self):
        with ExitStack() as until_ready:
            until_ready.push(self._stack)
            self.subnet = free_subnet()
            pid = self._isolated(SWITCH.format(gateway=f"{self.subnet}.254"))
            self._at_switch = partial(run, "nsenter", f"--target={pid}", "--net")
            self.interface = f"switch-{self.subnet.rpartition('.')[2]}"  # of this machine
            self.address = self._port(os.getpid(), self.interface, run)
            until_ready.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def plug_in(self, name, known=""):
        """Return a new Host. known: names that it takes for its loopback, as Debian does with the host's own."""
        pid = self._isolated(HOST.format(name=name, known=known, hide=hide()))
        on_host = partial(run, "nsenter", f"--target={pid}", "--net")
        address = self._port(pid, "eth0", on_host)
        on_host("ip", "route", "add", "default", "via", f"{self.subnet}.254")
        self.hosts[name] = Host(name, address, pid, f"port{self._n_ports}", self._at_switch, self.log)
        return self.hosts[name]

    def said(self):
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-6000:]

    def _isolated(self, script):
        process = subprocess.Popen(
            [*ISOLATED, "bash", "-e", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        said = []
        while (line := process.stdout.readline()) != "ready\n":
            assert line, f"a host did not start:\n{''.join(said)}"
            said.append(line)
        return psutil.Process(process.pid).children()[0].pid

    def _port(self, pid, interface, on_host):
        self._n_ports += 1
        address, port = f"{self.subnet}.{self._n_ports}", f"port{self._n_ports}"
        self._at_switch("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", pid)
        self._at_switch("ip", "link", "set", port, "master", "switch", "up")
        on_host("ip", "addr", "add", f"{address}/24", "dev", interface)
        on_host("ip", "link", "set", interface, "up")
        return address


def hide():
    """Return the lines that put an empty disk over the temporary folders, the home folder and the project's folders.

    What Python needs stays visible, wherever it lies, and so do the packages, which are installed on each host.
    """
    (installed,) = importlib.metadata.distributions(name="workshop-dask-pytorch", path=[sysconfig.get_path("purelib")])
    origin = json.loads(installed.read_text("direct_url.json"))["url"].removeprefix("file://")
    hidden = {Path(path).resolve() for path in ("/tmp", "/var/tmp", "/dev/shm", Path.home(), ROOT, origin)}
    packages = {Path(origin, name).resolve() for name in ("workshop_utils", "daskrun/src")}
    kept = [path for path in sorted({PREFIX, BASE, *packages}) if any(path.is_relative_to(folder) for folder in hidden)]
    q = {path: shlex.quote(str(path)) for path in (*hidden, *kept)}
    held = [f"exec {3 + number}< {q[path]}" for number, path in enumerate(kept)]  # open, it can be had after it is gone
    lines = [*held, *(f"mkdir -p {q[folder]}; mount -t tmpfs tmpfs {q[folder]}" for folder in sorted(hidden))]
    for number, path in enumerate(kept):
        at, held_as = q[path], f"/proc/self/fd/{3 + number}"
        lines += [f"mkdir -p {at}; mount --no-canonicalize --bind {held_as} {at}; mount -o remount,bind,ro {at}"]
        lines += [f"exec {3 + number}<&-"]
    return "\n".join(lines)


def free_subnet():
    """Return the first three numbers of a network of 254 addresses that this machine does not know."""
    routes = {route["dst"] for route in json.loads(run("ip", "-json", "route"))}
    choice = [subnet for n in range(1, 255) if f"{(subnet := f'10.77.{n}')}.0/24" not in routes]
    return secrets.choice(choice)


def lasting_port():
    """Return a free port that no other test gets by asking for any: the kernel gives those from a range of its own."""
    first_of_the_kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(10_000, first_of_the_kernels))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run(*words):
    """Return what a command prints."""
    done = subprocess.run([*map(str, words)], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, f"{shlex.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done.stdout


def kill(process):
    """End a process that `Host.start` started, and all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def s3_server(host):
    """Run a real S3 server on a host; yield the variables by which others reach it, and may write."""
    keys = {"accessKey": USER, "secretKey": secrets.token_urlsafe()}
    users = {"identities": [{"name": USER, "credentials": [keys], "actions": ["Admin"]}]}
    host.run("tee", "/tmp/s3.json", input=json.dumps(users))
    flags = [f"-ip={host.address}", f"-ip.bind={host.address}", "-dir=/tmp", "-volume.max=8", "-master.telemetry=false"]
    flags += ["-master.volumeSizeLimitMB=256", "-s3", "-s3.port=8333", "-s3.config=/tmp/s3.json"]
    flags += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    server = host.start(PREFIX / "bin/weed", "server", *flags, TMPDIR="/tmp")
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host.address}:8333",
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": keys["secretKey"],
        }
    finally:
        kill(server)
