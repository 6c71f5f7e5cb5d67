"""Tokens per second by batch size: without speculation, with a fixed chain, and with a plan of `spec plan`."""
