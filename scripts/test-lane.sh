#!/usr/bin/env bash
# Sets up a virtual environment of its own for one lane and tests the series there.
#   scripts/test-lane.sh LANE [VENV]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lane=${1:-}
venv=${2:-.venv-$lane}
known() { for folder in patches/*/; do basename "$folder"; done | sort -V | tr '\n' ' '; }

problem="no lane for sglang $lane"
[[ -n $lane ]] || problem="no lane is named"
if [[ -z $lane || ! -f patches/$lane/series || ! -f lanes/$lane.txt ]]; then
  {
    echo "test-lane: $problem"
    echo "  lanes      $(known)"
    echo "  remedy     make test-lane LANE=X with one of them; or make the lane: sglang-patches port --to ${lane:-X}, and" \
      "pin its upstream stack in lanes/${lane:-X}.txt"
  } >&2
  exit 2
fi

say() { printf '\n== lane %s: %s\n' "$lane" "$*"; }

started=$SECONDS
say "environment $venv"
if [[ ! -f $venv/.installed || $venv/.installed -ot pyproject.toml || $venv/.installed -ot lanes/$lane.txt ]]; then
  scripts/setup.sh "$venv" "lanes/$lane.txt"
  touch "$venv/.installed"
fi
# Nothing of the shell that starts this may decide what is tested.
unset SGLANG_PATCHES SGLANG_PATCHES_DIR PYTHONPATH PYTHONDONTWRITEBYTECODE
python=$venv/bin/python
installed=$("$python" -c 'from sglang_patches import upstream; print(upstream.locate().release)')
if [[ $installed != "$lane" ]]; then
  echo "test-lane: $venv has sglang $installed, wanted $lane; remove it: rm -r $venv" >&2
  exit 1
fi
"$venv/bin/sglang-patches" status

say "verify: pre-images, applied alone, in pairs and together"
"$venv/bin/sglang-patches" verify
say "import of every patched file, and the tests that hold for this lane"
"$python" -m pytest -q test/unit/test_real_upstream.py test/unit/test_subsets.py test/unit/test_lane.py test/runtime test/sgl_kernel
say "main job: a server on the CPU, greedy answers equal to those of transformers, EAGLE-3 accept length"
"$python" -m pytest -q -m main_job test/e2e
say "passed in $((SECONDS - started)) s"
