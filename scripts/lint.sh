#!/usr/bin/env bash
# lint.sh [--fix]: gofmt, golangci-lint (.golangci.yml; both builds), clang-format, shellcheck. --fix formats in place.
. "$(dirname "$0")/env.sh"
golangci_version=v2.15.0
fix=${1:-}
rc=0

# Tracked and new files, without what git ignores.
files() { git ls-files --cached --others --exclude-standard -z -- "$@" | xargs -0 -r ls -d 2>/dev/null || true; }
mapfile -t go_files < <(files '*.go')
mapfile -t c_files < <(files '*.c' '*.h' '*.cpp' '*.cu')
mapfile -t sh_files < <(files '*.sh' .ci/run)

toolchain lint
say "gofmt"
if [ "$fix" = --fix ]; then
  gofmt -w "${go_files[@]}"
else
  unformatted=$(gofmt -l "${go_files[@]}")
  [ -z "$unformatted" ] || { note "not gofmt'd (make format):" "$unformatted"; rc=1; }
fi

if [ -n "$AR_CLANG_FORMAT" ]; then
  say "clang-format"
  if [ "$fix" = --fix ]; then
    "$AR_CLANG_FORMAT" -i "${c_files[@]}"
  else
    unformatted=$(for file in "${c_files[@]}"; do
      "$AR_CLANG_FORMAT" --dry-run --Werror "$file" 2>/dev/null || echo "$file"
    done)
    [ -z "$unformatted" ] || { note "not clang-format'd (make format):" "$unformatted"; rc=1; }
  fi
fi
[ "$fix" != --fix ] || exit "$rc"

if command -v shellcheck >/dev/null; then
  say "shellcheck"
  shellcheck --external-sources --source-path=SCRIPTDIR "${sh_files[@]}" || rc=1
else
  missing "shellcheck is not installed: skipped (Debian: apt-get install shellcheck)"
fi

golangci=$build/toolchain/bin/golangci-lint
if [ "$("$golangci" version --short 2>/dev/null)" != "${golangci_version#v}" ]; then
  say "building golangci-lint $golangci_version (once, about two minutes)"
  log=$build/toolchain/golangci.log
  GOBIN=$build/toolchain/bin CGO_ENABLED=0 GOFLAGS='' \
    go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$golangci_version" 2>"$log" || {
    tail -n 5 "$log" >&2
    missing "golangci-lint could not be built: skipped"
    exit "$rc"
  }
fi
go_env emulated
for build_tags in '' cuda; do
  say "golangci-lint${build_tags:+, tag $build_tags}"
  "$golangci" run ${build_tags:+--build-tags "$build_tags"} ./... || rc=1
done
exit "$rc"
