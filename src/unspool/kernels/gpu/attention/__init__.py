"""Attention of captured passes, and the addressing and copying of its keys."""
