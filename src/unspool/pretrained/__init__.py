"""The names that code for transformers imports, on native models and tokenizers: `from_pretrained`, `pipeline`."""
