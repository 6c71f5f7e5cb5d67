"""Step time of FlashInfer MLA with an FP8 KV cache against the size of the pool; see README.md."""
