"""What runs in a Dask worker's process: it starts its rank's process, and passes on what that sends."""
