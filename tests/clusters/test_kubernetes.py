"""The manifests are what the operator's schema and the package ask for: checked field by field, not deployed."""

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from workshop_utils.cluster import worker_settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
CRDS = ROOT / ".venv/kubernetes/dask_kubernetes/operator/deployment/helm/dask-kubernetes-operator/crds"
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "GiB": 2**30}  # as Kubernetes and Dask write them

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not CRDS.exists(), reason="the operator's schema is not here: bash tests/clusters/install.sh"),
]
both = pytest.mark.parametrize("kind", ["cpu", "gpu"])


@pytest.fixture(scope="module")
def refusals():
    """Return a function that names what the operator's schema refuses in a DaskCluster."""
    (version,) = yaml.safe_load((CRDS / "daskcluster.yaml").read_text())["spec"]["versions"]
    schema = structural(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {
        "apiVersion": {"const": "kubernetes.dask.org/v1"},
        "kind": {"const": "DaskCluster"},
        "metadata": {"type": "object"},
    }
    validator = Draft202012Validator(schema | {"required": ["apiVersion", "kind", "metadata", "spec"]})
    return lambda manifest: [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def structural(schema):
    """Return a schema that also refuses fields which it does not name; Kubernetes would drop them without a word."""
    if isinstance(schema, list):
        return [structural(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: structural(value) for name, value in schema.items()}
    open_to_more = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_to_more:
        schema["additionalProperties"] = False
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return schema


def read(name):
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def worker_of(manifest):
    spec = manifest["spec"]["worker"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def in_bytes(amount):
    number = amount.rstrip("KMGiB")
    return float(number) * BINARY[amount[len(number) :]]


@both
def test_the_operators_schema_takes_the_manifest(kind, refusals):
    assert refusals(read(kind)) == []


@both
def test_workers_have_the_settings_that_pytorch_needs_and_a_place_to_share(kind):
    for worker in (worker_of(read(kind))[1], read(f"helm-{kind}")["worker"]):
        given = {variable["name"]: variable["value"] for variable in worker["env"]}
        cores = int(worker["resources"]["limits"]["cpu"])
        assert given == worker_settings(cores) | {"WORKSHOP_SHARED": "s3://BUCKET/workshop"}


@both
def test_the_shared_memory_is_in_memory_and_leaves_room_for_the_worker(kind):
    spec, worker = worker_of(read(kind))
    helm = read(f"helm-{kind}")["worker"]
    for volumes, mounts, container in (
        (spec["volumes"], worker["volumeMounts"], worker),
        (helm["mounts"]["volumes"], helm["mounts"]["volumeMounts"], helm),
    ):
        (volume,), (mount,) = volumes, mounts
        assert mount == {"name": volume["name"], "mountPath": "/dev/shm"} and volume["emptyDir"]["medium"] == "Memory"
        assert 2**30 <= in_bytes(volume["emptyDir"]["sizeLimit"]) < in_bytes(container["resources"]["limits"]["memory"])
    limit = in_bytes(worker["args"][worker["args"].index("--memory-limit") + 1])
    room = in_bytes(worker["resources"]["limits"]["memory"]) - in_bytes(spec["volumes"][0]["emptyDir"]["sizeLimit"])
    assert limit <= room


@both
def test_a_worker_has_a_nanny_one_thread_and_on_gpus_one_gpu(kind):
    _, worker = worker_of(read(kind))
    assert worker["args"][:2] == ["dask", "worker"] and "--no-nanny" not in worker["args"]
    assert worker["args"][worker["args"].index("--nthreads") + 1] == "1"
    for limits in (worker["resources"]["limits"], read(f"helm-{kind}")["worker"]["resources"]["limits"]):
        assert limits.get("nvidia.com/gpu") == ("1" if kind == "gpu" else None)


@both
def test_the_service_selects_the_schedulers_pod(kind):
    manifest = read(kind)
    selector = manifest["spec"]["scheduler"]["service"]["selector"]
    name = manifest["metadata"]["name"]
    assert selector == {"dask.org/cluster-name": name, "dask.org/component": "scheduler"}


def test_the_image_has_the_pins_with_hashes_and_the_commands_that_the_helm_chart_calls():
    dockerfile = (KUBERNETES / "Dockerfile").read_text()
    assert "pip install --no-cache-dir --require-hashes -r requirements.txt" in dockerfile
    assert "for part in scheduler worker" in dockerfile and "/usr/local/bin/dask-$part" in dockerfile
    copied = {word for line in dockerfile.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
