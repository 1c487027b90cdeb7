"""Triton kernels of the decoding step; only imported where a CUDA device is used. Their torch references lie above."""
