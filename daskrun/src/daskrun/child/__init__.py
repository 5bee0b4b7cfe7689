"""What runs in a rank's own process, and in the template from which it's forked. It imports nothing of Dask."""
