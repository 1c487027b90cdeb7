"""Thoughts that a model writes before its answer: their kinds, where they begin and end, and a budget for them."""
