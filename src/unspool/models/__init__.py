"""Native models: one configurable decoder, one encoder-decoder, and the registry that finds the right description."""
