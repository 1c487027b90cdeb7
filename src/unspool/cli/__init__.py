"""The program: `unspool run`, `chat`, `models` and `pull`. Nothing here imports torch before a model is loaded."""
