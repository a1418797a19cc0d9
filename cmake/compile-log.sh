#!/bin/sh
# compile-log.sh LOG COMPILER ARGS...: runs the compiler; ptxas' informational lines go to LOG, the rest is shown.
log=$1
shift
"$@" >"$log" 2>&1
rc=$?
grep -Ev '^ptxas info|^    [0-9]+ bytes (stack|gmem)|^[[:space:]]*$|bytes stack frame|^[A-Za-z_]+\.cu$' "$log" >&2
exit "$rc"
