"""Native models: one configurable decoder, T5, and the registry that finds the right description."""
