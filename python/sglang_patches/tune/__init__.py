"""Commands that measure which settings of upstream's kernels are fast on this GPU: `sglang-patches tune`."""
