"""What tests on several hosts share: one cluster of three hosts for the session, and a client of it."""

import os

import pytest
import torch
import torch.distributed as dist
from hosts import BUCKET, PREFIX, SILENCE_S, Network, kill, missing, s3_server
from waiting import until

from daskrun.settings import worker_settings
from workshop_utils.cluster import start_cluster

DASK = PREFIX / "bin/dask"


class HostsCluster:
    """A Dask cluster and an S3 server on hosts of their own. variables: what all who use the storage have to set."""

    def __init__(self, network):
        self.network, self._processes, self._lost = network, {}, []
        self.head = network.plug_in("head")
        self.scheduler = f"tcp://{self.head.address}:8786"
        # A host's own name means its loopback, as on Debian, or nothing at all, as in many a container.
        self.hosts = [network.plug_in("one", known="one"), network.plug_in("two")]

    def set_up(self, variables):
        """Have all hosts set these variables for what they run."""
        self.variables = variables
        for host in (self.head, *self.hosts):
            host.variables |= variables | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": str(SILENCE_S)}

    def start(self):
        """Start the scheduler and the workers, where they do not run."""
        if not self._runs(self.head):
            self._processes[self.head] = self.head.start(DASK, "scheduler", "--no-dashboard")
        for host in self.hosts:
            if not self._runs(host):
                self.start_worker(host)

    def start_worker(self, host):
        """Start a worker on a host, as somebody else would."""
        core = self.hosts.index(host) % os.cpu_count()  # the only one that it has
        words = "taskset", "--cpu-list", core, DASK, "worker", self.scheduler, "--no-dashboard"
        self._processes[host] = host.start(*words, **worker_settings(1))

    def lose(self, host):
        """Cut a host off."""
        host.cut_off()
        self._lost.append(host)

    def bring_back(self):
        """Have the lost hosts in the network again, as after a start of theirs: with new workers."""
        while self._lost:
            host = self._lost.pop()
            kill(self._processes.pop(host))
            host.reconnect()
            self.start_worker(host)

    def join(self):
        """Return a client once both workers are there."""
        self.bring_back()
        self.start()
        client = start_cluster(address=self.scheduler, timeout_s=60)
        until(lambda: len(client.nthreads()) == len(self.hosts), self.network.said)
        return client

    def has_ended(self):
        """Return whether the scheduler and all workers have ended, as after `Client.shutdown`."""
        return not any(map(self._runs, (self.head, *self.hosts)))

    def _runs(self, host):
        return host in self._processes and self._processes[host].poll() is None


@pytest.fixture
def sum_up():
    def sum_up():  # in here it is pickled by value, as a notebook's functions are
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total)
        return total.item()

    return sum_up


@pytest.fixture(scope="session")
def hosts_cluster(tmp_path_factory):
    """Three hosts: a scheduler and an S3 server on one, and a worker on each of the others."""
    if why_not := missing():
        pytest.skip(why_not)
    with Network(tmp_path_factory.mktemp("hosts")) as network:
        cluster = HostsCluster(network)
        with s3_server(cluster.head) as variables:
            cluster.set_up(variables | {"WORKSHOP_SHARED": f"s3://{BUCKET}/shared"})
            cluster.start()
            make_bucket(variables, network.said)
            yield cluster


@pytest.fixture
def shared_storage(hosts_cluster, monkeypatch):
    """Let this process use the storage that the hosts use."""
    for name, value in hosts_cluster.variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def on_hosts(hosts_cluster, shared_storage):
    """A client of the cluster on hosts, with both workers."""
    with hosts_cluster.join() as client:
        yield client
    print(hosts_cluster.network.said())  # pytest shows it beside a failure


def make_bucket(variables, said):
    import s3fs

    fs = s3fs.S3FileSystem(
        key=variables["AWS_ACCESS_KEY_ID"],
        secret=variables["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
        config_kwargs={"retries": {"max_attempts": 0}},
    )

    def is_ready():  # its port answers seconds before it can store anything
        try:
            fs.makedirs(BUCKET, exist_ok=True)
            fs.pipe_file(f"{BUCKET}/ready", b"ready")
            return True
        except Exception:  # refused connections and half-started servers fail in many ways
            return False

    until(is_ready, said)
