"""A cluster that talks TLS is joined by Dask's own settings, and tells who has no certificate of it what to set."""

import datetime
from contextlib import ExitStack

import dask
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from processes import dask_cluster

import daskrun
from daskrun import ClusterError
from daskrun.settings import worker_settings
from workshop_utils.cluster import start_cluster

pytestmark = pytest.mark.clusters
ROLES = "scheduler", "worker", "client"


def certificates(folder):
    """Make a CA and a certificate of it for all roles; return Dask's settings that name the files."""

    def certify(name, issuer, key, signing_key, is_ca):
        now, name = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        ours = x509.CertificateBuilder().subject_name(name).issuer_name(issuer.subject if issuer else name)
        ours = ours.public_key(key.public_key()).serial_number(x509.random_serial_number())
        ours = ours.not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
        ours = ours.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        return ours.sign(signing_key, hashes.SHA256())

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certify("the test's CA", None, ca_key, ca_key, True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "cert.pem").write_bytes(certify("the test", ca, key, ca_key, False).public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    of_roles = {f"{role}.{what}": str(folder / f"{what}.pem") for role in ROLES for what in ("cert", "key")}
    files = {"ca-file": str(folder / "ca.pem"), **of_roles}
    return {f"distributed.comm.tls.{name}": path for name, path in files.items()}


def as_variables(settings):
    """Return Dask's settings as environment variables."""
    return {f"DASK_{name.upper()}".replace(".", "__").replace("-", "_"): value for name, value in settings.items()}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def address(settings, tmp_path_factory):
    """The address of a scheduler with two workers, which talk with nobody but by TLS."""
    required = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"}
    environment = as_variables(settings) | worker_settings(1) | required
    with ExitStack() as stack:
        with dask.config.set(settings):
            cluster = dask_cluster(tmp_path_factory.mktemp("cluster"), 2, "--protocol", "tls", **environment)
            client, _ = stack.enter_context(cluster)
        yield client.scheduler.address


@pytest.mark.filterwarnings("ignore:Workers do not suit PyTorch")  # each has one core of several
def test_ranks_meet_on_a_cluster_that_talks_tls(address, settings, sum_up):
    with dask.config.set(settings), start_cluster(address=address) as client:
        assert daskrun.run(client, sum_up, time_limit=240) == [3.0, 3.0]
        assert all(worker.startswith("tls://") for worker in [address, *client.nthreads()])


def test_who_has_no_certificate_is_refused_and_told_what_to_set(address):
    with pytest.raises(ClusterError, match="distributed.comm.tls"):
        start_cluster(address=address, timeout_s=5)


def test_who_talks_no_tls_is_refused(address):
    with pytest.raises(ClusterError, match="tls://"):
        start_cluster(address=address.replace("tls", "tcp"), timeout_s=5)
