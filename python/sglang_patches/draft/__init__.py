"""EAGLE-3 draft checkpoints, read without upstream: what conventions they come in, and whether they fit a target.

Shared by patches ``kimi-k25-eagle3-delegation`` and ``llama-eagle3-draft-loading`` and by ``sglang-patches draft``, so
nothing here imports upstream, nor torch at import.
"""
