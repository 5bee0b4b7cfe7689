#!/usr/bin/env bash
# Install what a bare Debian lacks for the tests: a browser, a compiler for Horovod, and what makes
# another bare Debian in a folder.
set -euo pipefail
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ "$(id -u)" = 0 ] && ! { type chromium g++ mmdebstrap ip && ls "$headers/Python.h"; } >/dev/null 2>&1; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    chromium g++ iproute2 mmdebstrap python3-dev >/dev/null
fi
