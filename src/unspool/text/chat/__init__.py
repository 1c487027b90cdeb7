"""Chat templates: the one place that runs them."""

from unspool.text.chat.render import cut_after_last_message, render_chat

__all__ = ["cut_after_last_message", "render_chat"]
