"""Pipelines: a model and its tokenizer behind one call, one class for each kind of task."""
