#!/usr/bin/env bash
# run.sh [NAME...]: runs every test of the bundle on this machine's GPUs, or those whose name contains a NAME.
# run.sh --unpack DIR: puts the command and the tests into DIR instead.
# Leaves run.log (all output), run.json (what `allreduce run` measured), results.json and table.txt in ${OUT:-.}; prints
# the table last. Exit status 1 if anything failed.
#   LIMIT=240  seconds for each test     AR_TEST_BACKEND=cuda  a missing GPU fails a test instead of skipping it
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${OUT:-.}"
out=$(cd "${OUT:-.}" && pwd)
limit=${LIMIT:-240}
export AR_TEST_BACKEND=${AR_TEST_BACKEND:-cuda}
unpack() {
  tar -xJf "$here/bundle.tar.xz" -C "$1" 2>/dev/null || # no xz here: python has its own
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$here/bundle.tar.xz" "$1"
}
if [ "${1-}" = --unpack ]; then
  mkdir -p "${2:?--unpack DIR}" && unpack "$2"
  exit
fi
patterns=("$@")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unpack "$work" || exit 2
export AR_COMMAND=$work/allreduce # for tests that run the command
log=$out/run.log
: >"$log"
printf '%-44s %-6s %9s %8s\n' test result seconds skipped >"$out/table.txt"
json='' passed=0 failed=0

wanted() {
  [ "${#patterns[@]}" -gt 0 ] || return 0
  local pattern
  for pattern in "${patterns[@]}"; do [[ $1 == *"$pattern"* ]] && return 0; done
  return 1
}

# check NAME DIR COMMAND...: one row.
check() {
  local name=$1 dir=$2 start rc ms result=pass skipped seconds
  shift 2
  wanted "$name" || return 0
  start=$(date +%s%3N)
  (
    cd "$dir" || exit 2
    timeout -k 10 "$limit" "$@"
    exit $? # a shell of its own reports a crash, into the log
  ) >"$work/output" 2>&1 </dev/null
  rc=$?
  ms=$(($(date +%s%3N) - start))
  seconds=$(printf '%d.%03d' $((ms / 1000)) $((ms % 1000)))
  skipped=$(grep -cE '^ *--- SKIP|^\[  SKIPPED \] .*\([0-9]+ ms\)' "$work/output")
  { printf '\n===== %s: exit %d after %s s\n' "$name" "$rc" "$seconds" && cat "$work/output"; } >>"$log"
  if [ "$rc" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    result=FAIL
    printf '===== %s: exit %d%s; last lines:\n' "$name" "$rc" "$([ "$rc" -ne 124 ] || echo " (over $limit s)")"
    # The tail of a verbose log is often only passes.
    grep -E -A 12 '^ *--- FAIL|: Failure$|^panic:|^fatal error:' "$work/output" | head -n 60 | grep . ||
      tail -n 15 "$work/output"
  fi
  printf '%-44s %-6s %9s %8d\n' "$name" "$result" "$seconds" "$skipped" >>"$out/table.txt"
  json+=$(printf '%s\n    {"name": "%s", "ok": %s, "exit": %d, "seconds": %s, "skipped": %d}' "${json:+,}" "$name" \
    "$([ "$rc" -eq 0 ] && echo true || echo false)" "$rc" "$seconds" "$skipped")
}

check "command: version" "$work" "$AR_COMMAND" version --json
# shellcheck disable=SC2016 # expanded by the inner shell
check "command: run" "$work" sh -c '"$AR_COMMAND" run --json >"$0" && cat "$0"' "$out/run.json"
for binary in "$work"/cpp/*; do
  if [ -x "$binary" ]; then check "c++: $(basename "$binary")" "$work/cpp" "$binary"; fi
done
while read -r binary; do
  dir=$(dirname "$binary")
  name=${dir#"$work/go"}
  check "go: ${name:-/}" "$dir" "$binary" -test.v -test.timeout "$((limit - 5))s"
done < <(find "$work/go" -name '*.test' -type f | sort)

text() { tr -d '"\\\n\r' | cut -c1-200; }
smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }
gpus=$(smi name | sed 's/["\\]//g; s/.*/"&"/' | paste -sd, -)
{
  printf '{\n  "date": "%s",\n  "host": "%s",\n' "$(date -u +%FT%TZ)" "$(uname -nr | text)"
  printf '  "gpus": [%s],\n  "driver": "%s",\n' "$gpus" "$(smi driver_version | head -n 1 | text)"
  printf '  "backend": "%s",\n  "tests": [%s\n  ],\n' "$AR_TEST_BACKEND" "$json"
  printf '  "passed": %d,\n  "failed": %d,\n  "ok": %s\n}\n' "$passed" "$failed" \
    "$([ "$failed" -eq 0 ] && [ "$passed" -gt 0 ] && echo true || echo false)"
} >"$out/results.json"

echo
cat "$out/table.txt"
printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
