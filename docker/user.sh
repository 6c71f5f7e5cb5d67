#!/usr/bin/env bash
# The user that the server runs as, and the one folder that it writes to besides /tmp and /dev/shm.
#   docker/user.sh [UID] [ROOT]      ROOT is for tests
set -euo pipefail
uid=${1:-10001} root=${2:-}
if [[ ! $uid =~ ^[1-9][0-9]*$ ]]; then
  echo "user: UID is '$uid'; it must be a number above 0: the server does not run as root" >&2
  exit 2
fi
prefix=()
[[ -z $root ]] || prefix=(--prefix "$root")
# Upstream's libraries ask for the user's name and home.
groupadd "${prefix[@]}" --gid "$uid" sglang
useradd "${prefix[@]}" --uid "$uid" --gid "$uid" --home-dir /cache --no-create-home --shell /usr/sbin/nologin sglang
install -d -m 0700 -o "$uid" -g "$uid" "$root/cache"
install -d -m 0755 "$root/models"
