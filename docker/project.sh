#!/usr/bin/env bash
# Builds this project's wheel with the locked tools and installs it beside the locked packages (docker/install.sh).
#   docker/project.sh [PREFIX]      PREFIX is /opt/sglang-patches
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=${1:-/opt/sglang-patches}
tool_venv=${prefix%/*}/build-tools
uv=$tool_venv/bin/uv
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
umask 022
"$uv" build --quiet --wheel --no-build-isolation --python "$tool_venv/bin/python" --out-dir "$wheel" .
export UV_LINK_MODE=copy PYC_INVALIDATION_MODE=CHECKED_HASH
"$uv" pip install --python "$prefix/venv/bin/python" --no-deps --compile-bytecode \
  "$wheel"/*.whl
"$uv" pip check --python "$prefix/venv/bin/python"
