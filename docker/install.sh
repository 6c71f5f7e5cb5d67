#!/usr/bin/env bash
# Puts the locked packages into a virtual environment of their own; docker/project.sh adds this project.
#   LANE=0.5.23 CUDA=13.0.1 docker/install.sh [PREFIX]      PREFIX is /opt/sglang-patches
# Everything comes as a wheel whose hash is in docker/lock; nothing is built. What project.sh needs goes beside PREFIX, to
# build-tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=${1:-/opt/sglang-patches}
lane=${LANE:?install: LANE is not set; it is the upstream release, a folder of patches/}
cuda=${CUDA:?install: CUDA is not set; it is the version in the tag of the base image, such as 13.0.1}
lock=docker/lock/$lane-cu${cuda%%.*}.txt

if [[ ! -f $lock ]]; then
  echo "install: $lock is missing: nothing is locked for LANE=$lane with CUDA $cuda" >&2
  echo "  there are  $(cd docker/lock && echo *-cu*.txt)" >&2
  echo "  remedy     choose one of these, or make that lock: docker/lock.sh" >&2
  exit 1
fi
if ! grep -q "^sglang==$lane " "$lock"; then
  echo "install: $lock has $(grep -o '^sglang==[^ ]*' "$lock" || echo no sglang), not sglang==$lane; run docker/lock.sh" >&2
  exit 1
fi

tool_venv=${prefix%/*}/build-tools
python3 -m venv "$tool_venv"
"$tool_venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --require-hashes --requirement docker/lock/tools.txt

python3 -m venv --without-pip "$prefix/venv"
# Checked by hash and not by time: layers do not keep times to the nanosecond, and a stale file cannot be rewritten where
# the file system is read-only.
export UV_LINK_MODE=copy PYC_INVALIDATION_MODE=CHECKED_HASH
"$tool_venv/bin/uv" pip install --python "$prefix/venv/bin/python" --no-deps --only-binary :all: --compile-bytecode \
  --require-hashes --requirements "$lock"
# Read by the server's user, written by nobody. Here, since a later layer would hold a copy of each file that it changes.
chmod -R a+rX,go-w "$prefix"
