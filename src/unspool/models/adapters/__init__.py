"""Models of `transformers` as models of unspool's. transformers is imported here alone, and when it is needed."""

from unspool.models.adapters.door import Adapted, adapt, find_settings, is_transformers_model

__all__ = ["Adapted", "adapt", "find_settings", "is_transformers_model"]
