"""Hostile inputs of every kind: each must end in a result or in an error of unspool's own."""
