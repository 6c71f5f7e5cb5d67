#!/usr/bin/env bash
# What the container does:
#   RECIPE [ARGUMENTS]      serve by that recipe (`sglang-patches launch`): a name, or the path of a .yaml file
#   COMMAND [ARGUMENTS]     that command: sglang-patches doctor ..., python ..., bash
set -euo pipefail

if [[ -z ${SGLANG_PATCHES:-} ]]; then
  unset SGLANG_PATCHES # set and empty, as compose leaves it, it would win over a recipe's
fi
if [[ ${1:-} != *.yaml ]] && type -P "${1:-}" >/dev/null; then
  if [[ -n ${SGLANG_PATCHES:-} ]]; then
    # Another selection than the image was baked with needs a cache that it can write to. `launch` sees to that itself.
    export SGLANG_PATCHES_CACHE=$HOME/sglang-patches
  fi
  exec "$@"
fi
if [[ ! -w $HOME ]]; then
  {
    echo "entrypoint: $HOME cannot be written to by uid $(id -u) (it belongs to uid $(stat -c '%u, mode %a' "$HOME"))"
    echo "  needed     compiled kernels are kept there, and patched files where a selection is not the image's"
    echo "  remedy     give its volume's root folder to that user: chown $(id -u):$(id -g), mode 0700; in Kubernetes"
    echo "             docker/kubernetes.own-cache.yaml does so before the server starts (docs/image.md)"
  } >&2
  exit 1
fi
exec sglang-patches launch "$@"
