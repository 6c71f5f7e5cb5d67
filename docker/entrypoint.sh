#!/usr/bin/env bash
# What the container does:
#   RECIPE [ARGUMENTS]      serve by that recipe (`sglang-patches launch`): a name, or the path of a .yaml file
#   COMMAND [ARGUMENTS]     that command: sglang-patches doctor ..., python ..., bash
set -euo pipefail

if [[ -n ${SGLANG_PATCHES:-} ]]; then
  # Another selection than the image was baked with needs a cache that it can write to.
  export SGLANG_PATCHES_CACHE=$HOME/sglang-patches
else
  unset SGLANG_PATCHES # set and empty, as compose leaves it, it would win over a recipe's
fi
if [[ ${1:-} != *.yaml ]] && type -P "${1:-}" >/dev/null; then
  exec "$@"
fi
exec sglang-patches launch "$@"
