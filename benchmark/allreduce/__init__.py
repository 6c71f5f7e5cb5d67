"""What all-reduce costs, and whether every sum is right when its uses mix."""

from __future__ import annotations
