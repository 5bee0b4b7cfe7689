#!/bin/sh
# Time the parts of a test run. `tools/timed.sh PART COMMAND…` runs a part and adds its minutes to build/minutes, also if
# it fails. With BUDGET=MINUTES in the environment, a part that took half as much again has failed. Without arguments:
# print what all parts took, and begin anew.
if [ $# = 0 ]; then
  awk -F'\t' '{ printf "%6.1f min  %s\n", $2 / 60, $1; all += $2 } END { printf "%6.1f min  in all\n", all / 60 }' build/minutes
  rm build/minutes
  exit
fi
part=$1
shift
mkdir -p build
begin=$(date +%s)
"$@"
code=$?
seconds=$(($(date +%s) - begin))
printf '%s\t%s\n' "$part" $seconds >>build/minutes
if [ $code = 0 ] && [ -n "${BUDGET:-}" ] && [ $seconds -gt $((BUDGET * 90)) ]; then
  echo "$part took $seconds s, and has $BUDGET minutes: make it faster, or say in .ci/run why it takes longer."
  exit 1
fi
exit $code
