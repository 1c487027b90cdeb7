"""Random calls of tiny models, made by transformers' own `generate` and by ours in three ways, and compared."""
