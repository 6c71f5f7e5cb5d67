#!/usr/bin/env bash
# Builds the image, labelled with what is in it.
#   docker/build.sh TAG [BUILD OPTIONS]
#   docker/build.sh registry/sglang-patches:0.5.23 --build-arg BASE_DIGEST=sha256:...
# ENGINE is docker (with BuildKit), podman or buildah, with options of its own if need be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tag=${1:?usage: docker/build.sh TAG [BUILD OPTIONS]}
shift
read -ra engine <<<"${ENGINE:-docker}"
revision=$(git rev-parse HEAD)
[[ -z $(git status --porcelain) ]] || revision+=-dirty

identity=$(mktemp -d)
trap 'rm -rf "$identity"' EXIT
# The patch-set id is a hash over what is installed, so it is known when that stage is done; a label has to be given before.
"${engine[@]}" build --file docker/Dockerfile --target identity --output "type=local,dest=$identity" "$@" .
id=$(sed -n 's/^  "id": "\(.*\)",$/\1/p' "$identity/patch-set.json")
"${engine[@]}" build --file docker/Dockerfile --target runtime --tag "$tag" \
  --build-arg PATCH_SET="$id" --build-arg REVISION="$revision" "$@" .
echo "build: $tag: patch set $id, revision $revision"
