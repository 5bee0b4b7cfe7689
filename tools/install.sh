#!/bin/sh
# Install the pinned versions into a virtual environment: tools/install.sh VENV [WHEELS], which `make setup` calls.
# WHEELS is 1 for PyTorch's wheels for CPUs, a sixth of the download; 0 for the pins as they are, with CUDA on Linux; "keep"
# for the wheels for CPUs if their index answers, else the pins. If it is not given, a machine without an NVIDIA GPU, or with
# too old a driver or GPU, does as with "keep", and all others take the pins. VENV/.cpu says that VENV has those for CPUs.
# On macOS there is one kind of wheels, that of the pins, whatever is given.
set -eu
trap 'exit 130' INT
cd "$(dirname "$0")/.."
venv=$1 wheels=${2:-} system=$(uname) too_old=
oldest_driver=580 oldest_gpu=7.5  # for CUDA 13
answer_s=15  # limit for PyTorch's index; a third of it for a single answer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=$(sed -n 's/^\(torch[a-z]*\)==.*/\1/p' requirements.txt)
renew=$(printf -- '--reinstall-package %s ' $torch)  # both kinds of wheels have the same version
# PyTorch's wheels for CPUs, such as torch 2.15.0+cpu, have other hashes than the pins of torch, torchvision and torchcodec.
awk '/^[^ ]/ { torch = /^torch/; if (torch) sub(/ \\$/, "") } /^[^ ]/ || !torch' requirements.txt >"$work/pins"

smi() { PATH="$PATH:/usr/lib/wsl/lib" nvidia-smi "$@" 2>/dev/null; }

has_gpu() {  # that the pinned PyTorch can use
  smi -L | grep -q '^GPU' || return
  too_old=yes
  driver=$(smi --query-gpu=driver_version --format=csv,noheader | sed -n '1{s/[^0-9.].*//;p;q;}')
  newest=$(smi --query-gpu=compute_cap --format=csv,noheader | grep -E '^[0-9]+\.[0-9]$' | sort -V | tail -n 1)
  if [ "${newest:-9.0}" != "$(printf '%s\n' "${newest:-9.0}" $oldest_gpu | sort -V | tail -n 1)" ]; then
    echo "PyTorch with CUDA 13 needs a GPU of compute capability $oldest_gpu or higher, and this machine's has $newest: this" \
      "environment uses the CPU."
    return 1
  fi
  major=${driver%%.*}
  [ "${major:-$oldest_driver}" -lt "$oldest_driver" ] || { too_old= && return; }
  echo "PyTorch with CUDA 13 needs NVIDIA's driver $oldest_driver or newer, and this machine has $driver: this environment" \
    "uses the CPU. After an update of the driver: make clean setup CPU=0"
  return 1
}

say_size() {
  [ "$system" = Linux ] && size=", about $1" || size=
  echo "Fetching and installing packages$size: minutes on a fast network, longer on a slow one."
}

fail() {
  echo "The packages were not installed: see above. To try again, give the same command; what was fetched is kept. $*" >&2
  exit 1
}

index_answers() {  # as uv says, which knows the address
  env UV_HTTP_TIMEOUT=$((answer_s / 3)) UV_HTTP_CONNECT_TIMEOUT=$((answer_s / 3)) UV_HTTP_RETRIES=0 \
    timeout --foreground "$answer_s" "$venv/bin/uv" pip install --python "$venv/bin/python" --dry-run --no-deps \
    --torch-backend cpu --constraints "$work/pins" $torch
}

install_for_cpus() {
  say_size "0.6 GB"
  set -- $renew
  [ ! -e "$venv/.cpu" ] || set --
  touch "$venv/.cpu"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode --torch-backend cpu \
    --constraints "$work/pins" "$@" --editable '.[lab]' || fail "If PyTorch's own index is at fault, CPU=0 takes it from PyPI (3.4 GB)."
}

install_pins() {
  say_size "3.4 GB, with PyTorch from PyPI"
  set -- $renew
  [ -e "$venv/.cpu" ] || set --
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode --require-hashes "$@" -r requirements.txt ||
    fail
  rm -f "$venv/.cpu"
}

install_for_cpus_or_pins() {
  if index_answers >"$work/said" 2>&1; then
    install_for_cpus
    return
  fi
  why=$(sed -n 's/^ *cause: //p' "$work/said" | tail -n 1)
  why=${why:-$(grep -m 1 . "$work/said" || echo "no answer within $answer_s s")}
  echo "PyTorch's wheels for CPUs cannot be had from here ($why), so PyTorch comes from PyPI, with CUDA."
  [ -z "$too_old" ] || echo "It cannot use this machine's GPU: export CUDA_VISIBLE_DEVICES= for all that follows."
  install_pins
}

[ "$system" = Linux ] || wheels=0
case $wheels in
  0) install_pins ;;
  1) install_for_cpus ;;
  keep) install_for_cpus_or_pins ;;
  *) if ! has_gpu; then install_for_cpus_or_pins; else install_pins; fi ;;
esac
