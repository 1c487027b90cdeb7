"""Models of `transformers` as models of unspool. transformers is imported only here, and only when it is needed."""

from unspool.models.adapters.door import Adapted, adapt, find_settings, is_transformers_model

__all__ = ["Adapted", "adapt", "find_settings", "is_transformers_model"]
