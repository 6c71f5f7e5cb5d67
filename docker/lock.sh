#!/usr/bin/env bash
# Writes the image's lock files: every package that pyproject.toml wants, at one version, with the hashes of its files.
#   docker/lock.sh              keep the locked versions where pyproject.toml allows them
#   docker/lock.sh --upgrade    take the newest allowed ones
#   docker/lock.sh --check      change nothing; exit 1 where the files would change
# One lock serves Python 3.11 and 3.12 (outlines-core has no wheel for 3.13) on Linux x86_64 ([tool.uv] in
# pyproject.toml). Needs uv and the package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=${1:-}
case $mode in
  '' | --upgrade | --check) ;;
  *)
    echo "lock: unknown argument $mode; usage: docker/lock.sh [--upgrade | --check]" >&2
    exit 2
    ;;
esac
lane=$(sed -n 's/^  "sglang==\([^"]*\)",$/\1/p' pyproject.toml)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve() { # IN OUT
  local fresh=$work/${2##*/}
  if [[ $mode != --upgrade && -f $2 ]]; then
    cp "$2" "$fresh" # uv keeps the versions that it finds there
  fi
  {
    echo "# Made by docker/lock.sh from $1; do not edit."
    uv pip compile "$1" --universal --fork-strategy fewest --python-version 3.11 --generate-hashes \
      --no-header --no-annotate --no-emit-index-url --quiet --output-file "$fresh" >/dev/null
    cat "$fresh"
  } >"$fresh.new"
  if [[ $mode != --check ]]; then
    mv "$fresh.new" "$2"
  elif ! cmp --silent "$fresh.new" "$2"; then
    echo "lock: $2 is not what $1 resolves to; run docker/lock.sh and commit it" >&2
    return 1
  fi
}

status=0
resolve pyproject.toml "docker/lock/$lane-cu13.txt" || status=1
resolve docker/lock/tools.in docker/lock/tools.txt || status=1
exit $status
