"""Draft extend's attention on one GPU: upstream's kernels against those of patch draft-extend-split-kv; see `run`."""
