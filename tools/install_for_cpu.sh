#!/bin/sh
# Install the pinned versions into the active environment, with PyTorch's wheels for CPUs: a sixth of the download.
# `make lab CPU=1` calls it, and so do Codespaces.
set -eu
cd "$(dirname "$0")/.."
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
# PyTorch's wheels for CPUs, such as torch 2.15.0+cpu, have other hashes than the pins of torch, torchvision and torchcodec.
awk '/^[^ ]/ { torch = /^torch/; if (torch) sub(/ \\$/, "") } /^[^ ]/ || !torch' requirements.txt >"$pins"
python3 -m pip install --quiet uv
python3 -m uv pip install --quiet --compile-bytecode --python "$(command -v python3)" --torch-backend cpu \
  --constraints "$pins" --editable '.[lab]' || {
  echo "PyTorch's wheels for CPUs were not installed. If their index cannot be reached from here, \`make lab\` without CPU=1 takes PyTorch from PyPI, 3.4 GB in all." >&2
  exit 1
}
