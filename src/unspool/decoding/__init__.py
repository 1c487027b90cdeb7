"""Decoding: rows, the one step, the one loop; one file a strategy."""
