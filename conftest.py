"""What the tests of the workshop and of daskrun share: one cluster for the session, see daskrun/tests/shared_cluster.py."""

pytest_plugins = ["shared_cluster"]
