#!/usr/bin/env bash
# Debian and Ubuntu packages of the image.
#   docker/system.sh            those that the server needs
#   docker/system.sh NAME...    others, for a stage that builds
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
packages=("$@")
(($#)) || packages=(
  ca-certificates
  # Triton, flashinfer and tvm-ffi compile at the first use of a kernel: a C++ compiler and Python's headers.
  g++ gcc python3 python3-dev python3-venv
  # What torch, the NCCL transports and upstream's NUMA binding open by name.
  ibverbs-providers libgomp1 libibverbs1 libnuma1 librdmacm1 numactl
  # Process 1: reaps what a server leaves and hands signals on.
  tini
)
apt-get update
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log
if ! python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
  echo "system: the base image's python3 is $(python3 -V); the lock is for 3.11 and 3.12: choose another BASE" >&2
  exit 1
fi
