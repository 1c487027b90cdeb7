"""An OpenAI-compatible server over an engine, in which every setting works."""

from unspool.server.serving import asgi, serve

__all__ = ["asgi", "serve"]
