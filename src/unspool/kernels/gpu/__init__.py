"""Triton kernels of the decoding step, imported only if a GPU is used. Their torch references are in `kernels/`."""

from unspool.kernels.gpu.sources import read_sources_quickly
from unspool.kernels.presence import has_triton

if has_triton():
    read_sources_quickly()
