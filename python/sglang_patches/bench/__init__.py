"""Measuring: A/B, factorial and bisect over patches, verify-step times, and results that carry their code state."""
