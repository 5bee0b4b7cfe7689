"""Hosts of namespaces go with the process that made them, and one run's do not disturb another's."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import Network, missing, run, until

pytestmark = [pytest.mark.clusters, pytest.mark.skipif(bool(missing()), reason=missing() or "")]
PLUGS_IN = """
import pathlib, sys, time
from hosts import Network
with Network(pathlib.Path(sys.argv[1])) as network:
    host = network.plug_in("one")
    host.start("sleep", "100")
    print(network.interface, network.address, flush=True)
    time.sleep(100)
"""


def interfaces():
    return {line.split()[0].partition("@")[0]: line for line in run("ip", "-brief", "address").splitlines()}


def test_what_a_killed_run_has_made_is_gone_and_another_run_goes_on(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", PLUGS_IN, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other, Network(tmp_path) as network:
        host, (interface, address) = network.plug_in("one"), other.stdout.readline().split()
        until(lambda: len(psutil.Process(other.pid).children(recursive=True)) >= 6, interfaces)  # two to a namespace
        everything = psutil.Process(other.pid).children(recursive=True)
        assert f"{address}/24" in interfaces()[interface]
        other.kill()
        assert not psutil.wait_procs(everything, timeout=10)[1]
        until(lambda: interface not in interfaces(), interfaces, timeout_s=10)
        assert host.run("hostname") == "one\n" and network.address != address


def test_a_host_that_cannot_be_set_up_leaves_nothing(tmp_path):
    ours = psutil.Process()
    before = ours.children(recursive=True)
    with pytest.raises(AssertionError, match="a host did not start"), Network(tmp_path) as network:
        network.plug_in("no name of a host, since it is too long" * 2)
    until(lambda: network.interface not in interfaces(), interfaces, timeout_s=10)
    assert ours.children(recursive=True) == before


def test_a_host_has_a_name_a_disk_and_a_network_of_its_own(tmp_path):
    with Network(tmp_path) as network:
        one, two = network.plug_in("one", known="one"), network.plug_in("two")
        one.run("tee", "/tmp/note", input="one")
        assert two.run("ls", "/tmp") == "hosts\nresolv.conf\n" and not Path("/tmp/note").exists()
        assert one.run("getent", "hosts", "one").startswith("127.0.0.1")
        for command in (["getent", "hosts", "two"], ["touch", "/etc/note"], ["ls", str(tmp_path)]):
            with pytest.raises(AssertionError):
                two.run(*command)
        reaches = ["bash", "-c", f"exec 3<> /dev/tcp/{two.address}/1"]
        with pytest.raises(AssertionError, match="Connection refused"):  # it is there
            one.run(*reaches)
        two.cut_off()
        with pytest.raises(AssertionError) as silence:
            one.run("timeout", "2", *reaches)
        assert "refused" not in str(silence.value)
