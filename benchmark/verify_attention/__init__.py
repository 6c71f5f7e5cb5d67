"""Verify attention on one GPU: upstream's kernels against those of patch mla-verify-split-kv; see `run`."""
