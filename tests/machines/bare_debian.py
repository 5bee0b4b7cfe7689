"""A bare Debian in a folder: nothing but its package manager and what is asked for, and a user who is not root.

Each command runs in mount and process namespaces of its own: when it ends, however it ends, nothing stays mounted and
nothing that it started lives on. It sees no network but a loopback of its own, unless it is run with the host's.
"""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

USER = "attendee"
HOME = f"/home/{USER}"
CHECKOUT = f"{HOME}/workshop"
# How this machine reaches package registries: it differs from machine to machine, so the Debian gets what there is.
REGISTRY_VARIABLES = re.compile(r"(PIP|UV|SSL)_\w+|\w+_CA_BUNDLE|(https?|all|no)_proxy", re.IGNORECASE)
REGISTRY_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/uv/uv.toml", "/etc/ssl/certs/ca-certificates.crt")
LOCALE = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": HOME, "USER": USER}

# Ends with its parent, and with it all that it started and mounted.
ISOLATED = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child")


class BareDebian:
    """What `bare_debian` yields. root: the folder that holds the whole system."""

    def __init__(self, root, variables, shared):
        self.root = root
        self.variables = variables
        self.shared = shared  # {path inside: path on the host}

    def run(self, line, online=False, timeout_s=300):
        """Run a shell's line as the user, in the checkout if there is one, and return what it prints.

        Raises AssertionError with that if it fails.
        """
        assignments = [f"{name}={value}" for name, value in self.variables.items()]
        inside = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "env", "-i", *assignments]
        inside += ["bash", "-c", f"cd {CHECKOUT} 2>/dev/null || cd; {line}"]
        mounts = [["mount", "--rbind", f"/{name}", f"{self.root}/{name}"] for name in ("dev", "sys")]
        mounts += [["mount", "-t", "proc", "proc", f"{self.root}/proc"]]
        mounts += [["mount", "--bind", "-o", "ro", host, f"{self.root}{path}"] for path, host in self.shared.items()]
        first = mounts if online else [["ip", "link", "set", "lo", "up"], *mounts]
        script = "".join(f"{shlex.join(words)} && " for words in first) + f'chroot {self.root} "$@"; exit $?'
        # The shell, root still, stays the namespace's first process: one that changes its user outlives its parent.
        process = subprocess.Popen(
            [*ISOLATED, *([] if online else ["--net"]), "bash", "-c", script, "bash", *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, f"{line}: exit code {process.returncode}\n{output}"
        return output

    def copy(self, folder):
        """Copy the files of `folder` that git tracks, as they are now, into the checkout."""
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
        tracked = subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
        target = Path(f"{self.root}{CHECKOUT}")
        for name in os.fsdecode(tracked).split("\0")[:-1]:
            if (folder / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / name, target / name)
        subprocess.run(["chroot", self.root, "chown", "--recursive", f"{USER}:", CHECKOUT], check=True)


@contextmanager
def bare_debian(suite, *packages):
    """Yield a `BareDebian` of this suite, such as "trixie", with these packages; remove it at the end of the block."""
    with vanishing_folder(f"{suite}-") as root:
        command = [*ISOLATED, "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
        made = subprocess.run([*command, suite, root], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        subprocess.run(["chroot", root, "useradd", "--create-home", "--shell=/bin/bash", USER], check=True)
        yield BareDebian(root, *registries(Path(root)))


@contextmanager
def vanishing_folder(prefix):
    """Yield a new folder that is gone at the end of the block, or when this process ends, however it ends."""
    folder = tempfile.mkdtemp(prefix=prefix, dir="/var/tmp")  # /tmp may lie in memory
    os.chmod(folder, 0o755)
    remove = 'read; rm -rf --one-file-system "$0" || { sleep 2; rm -rf --one-file-system "$0"; }'
    remover = subprocess.Popen(["bash", "-c", remove, folder], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        remover.stdin.close()  # as the kernel does when this process is killed
        remover.wait()


def registries(root):
    """Return the variables and {path inside: path on the host} that lead to package registries; write pip's file."""
    variables = {name: value for name, value in os.environ.items() if REGISTRY_VARIABLES.fullmatch(name)}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = configparser.RawConfigParser()
    for name, value in re.findall(r"^(?!:env:)(\S+)='(.*)'$", listed.stdout, flags=re.MULTILINE):
        section, option = name.split(".", 1)
        settings.read_dict({section: {option: value}})
    with (root / "etc/pip.conf").open("w") as file:
        settings.write(file)
    named = " ".join([*variables.values(), *(value for part in settings.values() for value in part.values())])
    # A folder's links may lead to folders beside it.
    named = re.sub(r"file://(\S+)", lambda url: str(Path(url[1]).parent), named).split()
    paths = {path for path in (*named, *REGISTRY_FILES) if path.startswith("/") and Path(path).exists()} - {"/"}
    shared = {path: str(Path(path).resolve()) for path in sorted(paths)}
    for path, host in shared.items():
        make_mount_point(root / path[1:], Path(host).is_dir())
    return LOCALE | variables, shared


def make_mount_point(path, is_folder):
    if path.is_symlink():
        path.unlink()  # a mount would follow it, and out of the folder
    (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
    if not is_folder:
        path.touch()
