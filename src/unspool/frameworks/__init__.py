"""The specification's TensorFlow and Flax names: outputs, and processors that are one set of rules over any arrays."""
