#!/bin/sh
# Print why a virtual environment cannot be used as it is; print nothing if it is whole or not there. One that is a link
# belongs to whoever installed it, and is left alone. With "remove", delete a broken one, unless somebody else has it.
venv=$1
[ -d "$venv" ] && [ ! -L "$venv" ] && [ -n "$(ls -A "$venv")" ] || exit 0
fits='import sys, sysconfig, os
sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and os.path.isdir(sysconfig.get_path("purelib"))))'
reason=
installer=$(cat "$venv/.installing" 2>/dev/null)
if [ -n "$installer" ] && kill -0 "$installer" 2>/dev/null; then
  reason="make (process $installer) is installing into it"
elif [ -e "$venv/.installing" ]; then
  installer= reason="its installation was interrupted"
elif ! "$venv/bin/python" -I -c "$fits" 2>/dev/null; then
  reason="its Python is gone, or is another one than before"
elif [ -x "$venv/bin/pip" ] && ! head -n 3 "$venv/bin/pip" | grep -qF "$(cd "$venv" && pwd -P)/bin/python"; then
  reason="it was made in another folder"
fi
[ -n "$reason" ] || exit 0
if [ "$2" != remove ]; then
  echo "$reason"
elif [ -n "$installer" ]; then
  echo "$venv is not ready: $reason. Wait for that, or end it; if it is no make, delete $venv/.installing." >&2
  exit 1
elif [ ! -e "$venv/pyvenv.cfg" ]; then
  echo "$venv is a folder, and no virtual environment: give another name as VENV, or empty it." >&2
  exit 1
elif [ ! -O "$venv" ]; then
  echo "$venv cannot be used: $reason. It is not yours: ask whose it is, or clone the workshop for yourself." >&2
  exit 1
else
  echo "$venv is made anew: $reason."
  rm -rf "$venv"
fi
