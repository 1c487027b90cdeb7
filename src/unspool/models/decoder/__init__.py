"""The configurable decoder: its description, its weights, its forward pass."""
