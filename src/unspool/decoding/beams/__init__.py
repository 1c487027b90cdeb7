"""Beam search: one search, and the beams of each method."""
