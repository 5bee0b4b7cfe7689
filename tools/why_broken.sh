#!/bin/sh
# Print why a virtual environment has to be made anew; print nothing if it is whole or not there. One that is a link
# belongs to whoever installed it, and is left alone.
venv=$1
[ -d "$venv" ] && [ ! -L "$venv" ] || exit 0
fits='import sys, sysconfig, os
sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and os.path.isdir(sysconfig.get_path("purelib"))))'
if [ -e "$venv/.installing" ]; then
  echo "its installation was interrupted"
elif ! "$venv/bin/python" -I -c "$fits" 2>/dev/null; then
  echo "its Python is gone, or is another one than before"
elif [ -x "$venv/bin/pip" ] && ! head -n 3 "$venv/bin/pip" | grep -qF "$(cd "$venv" && pwd -P)/bin/python"; then
  echo "it was made in another folder"
fi
