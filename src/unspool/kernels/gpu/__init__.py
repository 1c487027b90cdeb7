"""Triton kernels of the decoding step, imported only if a GPU is used. Their torch references are in `kernels/`."""
