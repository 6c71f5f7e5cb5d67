#!/usr/bin/env bash
# Checks the series on the installed upstream and leaves in PREFIX what a read-only image cannot make at run time:
#   cache/           the patched files as they are loaded, with bytecode, for hosts with and without a GPU
#   tree/            the whole patched package, for auditing
#   patch-set.json   id, release and hashes of the patches that are on on a GPU host
#   provenance.json  the code state of the image, system-packages.txt what its distribution brought
#   docker/bake.sh [PREFIX]      PREFIX is /opt/sglang-patches
set -euo pipefail
prefix=${1:-/opt/sglang-patches}
command=$prefix/venv/bin/sglang-patches
export SGLANG_PATCHES_CACHE=$prefix/cache
unset SGLANG_PATCHES
umask 022

"$command" verify

# A build sees no GPU, the image will: what is on there has to be said.
listed() { "$command" list --json | "$prefix/venv/bin/python" -c "
import json, sys
print(','.join(patch['name'] for patch in json.load(sys.stdin) if patch['default'] in sys.argv[1:]))" "$@"; }
with_gpu=$(listed on)
SGLANG_PATCHES=$(listed on no-gpu) "$command" warm >/dev/null
SGLANG_PATCHES=$with_gpu "$command" warm >"$prefix/baked.tsv"
"$prefix/venv/bin/python" -m compileall -q --invalidation-mode checked-hash "$prefix/cache"

rm -rf "$prefix/tree"
SGLANG_PATCHES=$with_gpu "$command" build "$prefix/tree"
# What is audited is what runs.
while IFS=$'\t' read -r path copy; do
  if ! cmp "$prefix/tree/$path" "$copy"; then
    echo "bake: $copy is not $path of the patched tree" >&2
    exit 1
  fi
done <"$prefix/baked.tsv"
mv "$prefix/tree/sglang-patches.json" "$prefix/patch-set.json"
SGLANG_PATCHES=$with_gpu "$command" provenance --out "$prefix/provenance.json"
dpkg-query --show --showformat '${Package} ${Version}\n' >"$prefix/system-packages.txt"

# Read by the server's user, written by nobody; cached files are made for their owner alone.
chmod -R a+rX,go-w "$prefix/cache" "$prefix/tree"
chmod a+r "$prefix"/*.json "$prefix"/*.txt "$prefix"/*.tsv
