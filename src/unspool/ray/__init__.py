"""Many machines through Ray: rows of a dataset, files of prompts, and servers, with an engine in every actor.

>>> from unspool.ray import generate
>>> answered = generate(ds, "smollm2-135m", actors=(1, 4), max_new_tokens=64)
"""

from unspool.ray.dataset import Generate, generate

__all__ = ["Generate", "generate"]
