"""Speculative decoding: one verifier, and drafters behind one small protocol."""
