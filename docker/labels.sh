#!/usr/bin/env bash
# Refuses an image whose labels would not tell what is in it.
#   LANE=0.5.23 PATCH_SET=ID docker/labels.sh [PREFIX]      PREFIX is /opt/sglang-patches; no PATCH_SET: labelled `unset`
set -euo pipefail
prefix=${1:-/opt/sglang-patches}
value() { sed -n "s/^  \"$1\": \"\(.*\)\",\$/\1/p" "$prefix/patch-set.json"; }
id=$(value id)
release=$(value release)
if [[ $release != "${LANE:?labels: LANE is not set}" ]]; then
  echo "labels: LANE is $LANE, the image has sglang $release" >&2
  exit 1
fi
if [[ ${PATCH_SET:=$id} != "$id" ]]; then
  echo "labels: PATCH_SET is $PATCH_SET, the image has patch set $id; build with --build-arg PATCH_SET=$id" >&2
  exit 1
fi
echo "labels: sglang $release, patch set $id"
