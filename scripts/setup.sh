#!/usr/bin/env bash
# Makes the virtual environment VENV and installs this project, upstream and the test tools into it.
#   scripts/setup.sh VENV [CONSTRAINTS]
# CONSTRAINTS names the upstream stack, such as lanes/0.5.17.txt; without it the newest lane's is installed.
# A file of that name with .overrides instead of .txt beside it replaces what packages ask for.
# Uses uv, which resolves and unpacks the 10 GB about ten times faster than pip, and fetches it by pip where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?usage: scripts/setup.sh VENV [CONSTRAINTS]}
constraints=${2:-}
overrides=${constraints%.txt}.overrides
[[ -n $constraints && -f $overrides ]] || overrides=

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13; do
    # Version managers put shims on PATH that fail when run, so being there is not enough.
    if supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: found no Python 3.11, 3.12 or 3.13 on PATH (python3 is $(python3 -V 2>&1 || true));" \
    "install one or name it: make PYTHON=/path/to/python3.12" >&2
  return 1
}

started=$SECONDS
if ! supported "$venv/bin/python"; then
  python=$(find_python)
  echo "setup: making $venv with $("$python" -V) ..."
  if ! "$python" -m venv --clear "$venv"; then
    rm -rf "$venv"  # half made, it would pass for a good one next time
    echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
  fi
fi
uv=$(command -v uv || true)
if [[ -z $uv ]] || ! "$uv" --version >/dev/null 2>&1; then
  "$venv/bin/python" -m pip install --quiet uv
  uv=$venv/bin/uv
fi
echo "setup: installing the pinned upstream release and its libraries into $venv (10 GB, a minute or more) ..."
"$uv" pip install --python "$venv/bin/python" --editable '.[test,bench,docs]' ${constraints:+--constraint "$constraints"} \
  ${overrides:+--override "$overrides"}
echo "setup: done in $((SECONDS - started)) s"
