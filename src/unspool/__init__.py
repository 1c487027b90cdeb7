"""unspool: every way to decode a language model."""
from unspool._version import __version__
__all__ = ["__version__"]
