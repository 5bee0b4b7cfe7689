#!/bin/sh
# Install the pinned versions into the active environment, with PyTorch's wheels for CPUs: a sixth of the download.
# For machines that have no GPU and are thrown away, such as those behind the book's launch buttons.
set -eu
cd "$(dirname "$0")/.."
python3 -m pip install --quiet uv
python3 -m uv pip install --quiet --compile-bytecode --python "$(command -v python3)" --torch-backend cpu --constraints requirements.txt --editable .
