#!/usr/bin/env bash
# fuzz.sh [PACKAGE...]: every fuzz test of the module for FUZZTIME each (default 20s). A failing input is written to the
# package's testdata/fuzz, where plain `go test` runs it from then on: commit it with the fix.
. "$(dirname "$0")/env.sh"
go_env emulated
time=${FUZZTIME:-20s}
mapfile -t packages < <(go list "${@:-./...}")
rc=0 count=0
for package in "${packages[@]}"; do
  folder=$(go list -f '{{.Dir}}' "$package")
  mapfile -t targets < <(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$folder"/*_test.go 2>/dev/null | sed 's/^func //' | sort -u)
  for target in "${targets[@]}"; do
    say "$package $target, $time"
    count=$((count + 1))
    # Minimising what is merely new takes up to a minute by default, in which nothing is tried.
    go test "$package" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 1s | grep -vE 'gathering baseline|^PASS$' || rc=1
  done
done
[ "$count" -gt 0 ] || die "no fuzz test in ${packages[*]}"
exit "$rc"
