"""Models with an encoder."""
