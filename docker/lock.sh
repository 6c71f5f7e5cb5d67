#!/usr/bin/env bash
# Writes the image's lock files: every package that pyproject.toml wants, at one version, with the hashes of its files.
# Of the lanes that pyproject.toml admits it takes the newest folder of patches/, with the upstream stack that lanes/ pins.
#   docker/lock.sh              keep the locked versions where pyproject.toml and lanes/ allow them
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
lane=$(for folder in patches/*/; do basename "$folder"; done | sort --version-sort | tail -n 1)
stack=lanes/$lane.txt
if [[ ! -f $stack ]]; then
  echo "lock: $stack is missing: it pins the upstream stack of the newest folder of patches/" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve() { # IN OUT [UV OPTIONS]
  local input=$1 output=$2 fresh=$work/${2##*/}
  shift 2
  if [[ $mode != --upgrade && -f $output ]]; then
    cp "$output" "$fresh" # uv keeps the versions that it finds there
  fi
  # In a function that is called with `||` bash does not stop at errors by itself.
  if ! uv pip compile "$input" "$@" --universal --fork-strategy fewest --python-version 3.11 --generate-hashes \
    --no-header --no-annotate --no-emit-index-url --quiet --output-file "$fresh" >/dev/null; then
    echo "lock: $input was not resolved; $output is as it was" >&2
    return 1
  fi
  {
    echo "# Made by docker/lock.sh from $input; do not edit."
    cat "$fresh"
  } >"$fresh.new"
  if [[ $mode != --check ]]; then
    mv "$fresh.new" "$output"
  elif ! cmp --silent "$fresh.new" "$output"; then
    echo "lock: $output is not what $input resolves to; run docker/lock.sh and commit it" >&2
    return 1
  fi
}

status=0
resolve pyproject.toml "docker/lock/$lane-cu13.txt" --constraint "$stack" || status=1
resolve docker/lock/tools.in docker/lock/tools.txt || status=1
exit $status
