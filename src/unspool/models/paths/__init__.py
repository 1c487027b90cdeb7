"""The fast ways to run a decoder's pass."""
