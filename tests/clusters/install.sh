#!/usr/bin/env bash
# Install what tests/clusters and tests/faults start for real, where this machine lacks it and its user may: Slurm, sshd,
# network tools, a clock that can be set, and the schema of the Kubernetes operator. What cannot be had is skipped by
# the tests, which say so.
set -euo pipefail
bin=$1
if [ "$(id -u)" = 0 ] && type apt-get >/dev/null 2>&1 && ! { type slurmctld munged sshd ip tc unshare faketime; } >/dev/null 2>&1; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    slurm-wlm munge openssh-server openssh-client iproute2 util-linux faketime >/dev/null
fi
# Without what it needs: only its schemas are read.
[ -d "$bin/../kubernetes" ] || "$bin/uv" pip install --quiet --no-deps --require-hashes --target "$bin/../kubernetes" \
  -r "$(dirname "$0")/kubernetes.txt" || echo "The Kubernetes operator's schemas cannot be had here."
