"""Makes the small trained Kimi-K2.5 and EAGLE-3 checkpoints of `test/models/` from public-domain text.

Steps, each `python -m benchmark.tiny_kimi.<step>`: `corpus`, `tokenizer`, `target`, `generate`, `draft`, `evaluate`.
"""

from __future__ import annotations
