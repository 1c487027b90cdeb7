"""All blocks of an encoder-decoder's step in one kernel, whose programs stay from the first layer to the last."""
