"""Shorter prompts: which tokens a small model could have guessed, and the texts without them."""
