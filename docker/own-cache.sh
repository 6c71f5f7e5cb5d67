#!/usr/bin/env bash
# Gives the root folder of a volume to the server's user, and to nobody else: run as root before the server starts, where
# storage does not honour Kubernetes' fsGroup (docker/kubernetes.own-cache.yaml). Needs the capability CHOWN and no other.
#   docker/own-cache.sh [FOLDER [UID]]      /cache, 10001
# The server runs what it finds there, so a folder in which others have, or can write, anything is not handed over.
set -euo pipefail
folder=${1:-/cache} uid=${2:-10001}
refuse() {
  echo "own-cache: $folder $1" >&2
  echo "  remedy     $2" >&2
  exit 1
}
clean="look at what is there, remove it or take a new volume"

[[ -d $folder && ! -L $folder ]] || refuse "is no folder" "mount the volume there"
owner=$(stat -c %u "$folder")
if [[ $owner == "$uid" ]]; then
  [[ -z $(find "$folder" -maxdepth 0 -perm /022) ]] || refuse "is uid $uid's, and others can write to it" "$clean, then chmod 0700"
  echo "own-cache: $folder is uid $uid's already"
  exit 0
fi
[[ $owner == 0 ]] || refuse "belongs to uid $owner" "$clean; give it to uid $uid where the storage is administered"

chmod 0700 "$folder" # from here on nobody can add anything
# Below a folder that is the server's user's alone all is that user's; root may not even look into it.
found=$(find "$folder" -xdev -mindepth 1 -type d -uid "$uid" ! -perm /022 -prune -o \
  \( ! -uid 0 ! -uid "$uid" -o ! -type l -perm /002 -o ! -type l -perm /020 ! -gid "$uid" \) -print -quit) ||
  refuse "cannot be examined" "$clean"
[[ -z $found ]] || refuse "has $found, which another user owns or can write to" "$clean"
chown "$uid:$uid" "$folder" ||
  refuse "cannot be given away (NFS with root_squash?)" "chown $uid:$uid and chmod 0700 where the storage is administered"
echo "own-cache: $folder is uid $uid's now"
