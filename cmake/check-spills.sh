#!/bin/sh
# check-spills.sh LOG: fails where ptxas' report of a build names a kernel that spills registers.
# Spilled values go through memory in the middle of a kernel that waits for memory anyway: never worth it here.
awk '
  /Compiling entry function/ { split($0, part, "'"'"'"); kernel = part[2]; arch = part[4]; kernels++ }
  /bytes spill stores/ && !/ 0 bytes spill stores, 0 bytes spill loads/ { print arch, kernel ": " $0; bad = 1 }
  END {
    if (kernels == 0) { print "no kernel in the report"; bad = 1 }
    exit bad
  }' "$1"
