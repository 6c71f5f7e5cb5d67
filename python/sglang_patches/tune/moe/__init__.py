"""Fused-MoE tables by measurement: ``tune moe`` finds the tiles of upstream's Triton kernel and writes its files.

`worker` runs on one GPU, in a process of its own; `parent` shares the token counts out and writes the folder.
"""
