"""Verify in slices against one eager pass on one GPU: start-up's decision, outputs, answers and times; see `run`."""
