"""Keys in blocks of a pool."""
