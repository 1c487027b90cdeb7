"""Products of a few rows with plain and quantised matrices."""
