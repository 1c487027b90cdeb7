"""Chat templates: the one place that runs them."""

from unspool.text.chat.render import render_chat

__all__ = ["render_chat"]
