#!/bin/sh
# Run a part of `make test`: tools/timed.sh PART COMMAND…. Its minutes are added to build/minutes, also if it fails.
part=$1
shift
mkdir -p build
begin=$(date +%s)
"$@"
code=$?
printf '%s\t%s\n' "$part" $(($(date +%s) - begin)) >>build/minutes
exit $code
