"""Structured output: schemas, regular expressions, grammars and choices that a text keeps to the letter."""
