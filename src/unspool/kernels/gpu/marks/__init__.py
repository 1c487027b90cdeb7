"""Watermarks' kernels: contexts, Gumbel's draw, SynthID-Text's tournament and green lists."""
