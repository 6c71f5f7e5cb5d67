"""Patch oea-topk: what it costs in quality, on the bundled model; what it gains in time, on a GPU; see README.md."""

import sys
from pathlib import Path

# Upstream's `ModelRunner` of the bundled pair, and batches made by hand, are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "test/runtime"))
