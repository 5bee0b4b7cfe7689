"""The manifests are what the operator's schema and the package ask for: checked field by field, not deployed."""

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from daskrun.settings import worker_settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
CRDS = ROOT / ".venv/kubernetes/dask_kubernetes/operator/deployment/helm/dask-kubernetes-operator/crds"

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


@both
def test_the_operators_schema_takes_the_manifest(kind, refusals):
    assert refusals(read(kind)) == []


@both
def test_the_operators_schema_takes_the_readmes_shared_folder(kind, refusals):
    (added,) = re.findall(r"^```yaml\n(.*?)^```", (KUBERNETES / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    added, manifest = yaml.safe_load(added), read(kind)
    pod = manifest["spec"]["worker"]["spec"]
    pod["volumes"] += added["volumes"]
    pod["containers"][0]["volumeMounts"] += added["volumeMounts"]
    assert refusals(manifest) == []


@both
def test_workers_have_the_settings_that_pytorch_needs_and_a_place_to_share(kind):
    (container,) = read(kind)["spec"]["worker"]["spec"]["containers"]
    for worker in (container, read(f"helm-{kind}")["worker"]):
        given = {variable["name"]: variable["value"] for variable in worker["env"]}
        cores = int(worker["resources"]["limits"]["cpu"])
        assert given == worker_settings(cores) | {"WORKSHOP_SHARED": "s3://BUCKET/workshop"}
