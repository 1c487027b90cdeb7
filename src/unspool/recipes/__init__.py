"""Recipes: decoding methods that somebody shares as a folder with `custom_generate/generate.py`."""
