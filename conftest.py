"""What the tests of the workshop and of daskrun share: the cluster of daskrun/tests/shared_cluster.py."""

pytest_plugins = ["shared_cluster"]
