"""Attention of captured passes, and how its keys are found and moved."""
