#!/usr/bin/env bash
# gpu-bundle.sh: build/gpu-bundle, what a machine with only a GPU driver needs to run every test: the command, run.sh,
# and the compiled Go and C++ tests, all in bundle.tar.xz, which run.sh unpacks. Under 40 MiB, or it fails.
. "$(dirname "$0")/env.sh"
limit_mib=40

CUDA=required
toolchain cuda cmake
say "building the C++ tests"
cmake_build all
go_env cuda

bundle=$build/gpu-bundle
stage=$build/gpu-bundle.stage
rm -rf "$bundle" "$stage"
mkdir -p "$bundle" "$stage/cpp" "$stage/go"
say "building the command and the Go tests"
go build "${tags[@]}" -ldflags "-s -w $ldflags" -o "$stage/allreduce" ./cmd/allreduce

# Packages whose tests run on either backend; the others learn nothing on a GPU, and each costs about 3 MiB.
module=$(go list -m)
go list "${tags[@]}" -test -f '{{.ImportPath}}{{range .Deps}} {{.}}{{end}}' ./... |
  awk -v backend=" $module/internal/testbackend " '
    $1 ~ /\.test$/ && index($0 " ", backend) { print substr($1, 1, length($1) - 5) }' >"$stage.packages"
while read -r package; do
  # run.sh starts each test in the package's own place, so that relative paths to testdata hold.
  dir=.${package#"$module"}
  mkdir -p "$stage/go/$dir"
  go test -c "${tags[@]}" -ldflags "-s -w $ldflags" -o "$stage/go/$dir/$(basename "$package").test" "$package"
  if [ -d "$dir/testdata" ]; then cp -r "$dir/testdata" "$stage/go/$dir/"; fi
done <"$stage.packages"
if [ -d tests/testdata ]; then mkdir -p "$stage/go/tests" && cp -r tests/testdata "$stage/go/tests/"; fi

find "$build/tests" -maxdepth 1 -type f -perm -u+x -exec cp {} "$stage/cpp/" \;
find "$stage/cpp" -type f -exec strip {} +
[ -n "$(ls -A "$stage/cpp")" ] || missing "no C++ tests in the bundle (GoogleTest is not installed)"
# The binaries share most of their code: xz, with a window over all of them, makes half of what gzip does.
tar -C "$stage" -cf - allreduce cpp go | xz -T1 -3 --lzma2=preset=3,dict=128MiB >"$bundle/bundle.tar.xz"
install -m 755 scripts/gpu-run.sh "$bundle/run.sh"
rm -rf "$stage" "$stage.packages"

kib=$(du -sk --apparent-size "$bundle" | cut -f1)
say "build/gpu-bundle: $((kib / 1024)).$((kib % 1024 * 10 / 1024)) MiB (limit $limit_mib)"
[ "$kib" -le $((limit_mib * 1024)) ] || die "the bundle is larger than $limit_mib MiB (AR_CUDA_ARCHS with fewer architectures shrinks it)"
