#!/bin/sh
# Prints one number, 0x and 16 hex digits: the hash of the names and contents of everything in csrc/. It is compiled
# into the library, and Go's build cache sees edits to csrc/ only through it (CONTRIBUTING.md, "Stale builds").
set -eu
cd "$(dirname "$0")/.."
hash=$(find csrc -type f ! -name '.*' ! -name '*~' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
printf '0x%.16s\n' "$hash"
