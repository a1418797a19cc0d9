#!/bin/sh
# check-symbols.sh ARCHIVE SHARED: what the libraries let other code see. The shared library exports ar_* alone; the
# archive defines no unmangled global name without the prefix (C++ names live in our namespaces, CUDA's are its own).
set -eu
rc=0
exported=$(nm -D --defined-only "$2" | awk '$3 !~ /^ar_[a-z0-9_]*(@@.*)?$/ && $2 != "A" { print $3 }')
if [ -n "$exported" ]; then
  printf '%s exports more than ar_*:\n%s\n' "$2" "$exported" >&2
  rc=1
fi
if ! nm -D --defined-only "$2" | grep -q ' ar_abi_version'; then
  printf '%s does not export ar_abi_version\n' "$2" >&2
  rc=1
fi
foreign=$(nm -g --defined-only "$1" | awk 'NF == 3 && $3 !~ /^(ar_|_Z|__cuda|__fatbin|__nv|DW\.ref\.)/ { print $3 }')
if [ -n "$foreign" ]; then
  printf '%s defines global names without a prefix:\n%s\n' "$1" "$foreign" >&2
  rc=1
fi
exit "$rc"
