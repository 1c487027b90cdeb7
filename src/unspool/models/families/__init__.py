"""One file per family: its description from a config or a GGUF header, and the names of its weights."""
