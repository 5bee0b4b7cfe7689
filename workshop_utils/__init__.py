"""Plumbing of the workshop "Introduction to PyTorch with Dask"; the lessons are in `notebooks/`."""

__version__ = "0.1.0"
