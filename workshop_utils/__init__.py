"""Plumbing of the workshop "Introduction to PyTorch with Dask"; the lessons are in `notebooks/`."""

from importlib.util import find_spec

__version__ = "0.1.0"

_launcher = find_spec("daskrun")
if _launcher is None or _launcher.origin is None:  # without an origin, it's the folder of a clone
    raise ModuleNotFoundError(
        "workshop_utils needs daskrun, which is in the same repository: in its folder, pip install ./daskrun",
        name="daskrun",
    )
