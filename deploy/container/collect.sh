#!/bin/sh
# collect.sh PROGRAMS FILES: makes FILES a root file system in which the programs of the folder PROGRAMS run, and which
# has nothing else: the programs without symbols, the shared libraries that they name, the loader, and a user.
set -eu
programs=$1 files=$2

mkdir -p "$files/usr/bin" "$files/etc" "$files/tmp"
for program in "$programs"/*; do
  strip -o "$files/usr/bin/${program##*/}" "$program"  # Symbols, for debuggers alone, are a tenth of it.
done
chmod 0755 "$files"/usr/bin/*

ldd "$programs"/* >/tmp/libraries
if grep 'not found' /tmp/libraries; then exit 1; fi
grep -o '/[^ ]*\.so[^ ]*' /tmp/libraries | sort -u | while read -r library; do
  mkdir -p "$files$(dirname "$library")"
  cp -L "$library" "$files$library"
done

echo 'sinkhorn:x:65532:65532:Sinkhorn Service:/:/sbin/nologin' >"$files/etc/passwd"
echo 'sinkhorn:x:65532:' >"$files/etc/group"
chmod 1777 "$files/tmp"
