"""Pictures in prompts: where they stand in messages, and how their files are opened within bounds."""

from unspool.pictures.chats import Pictured, take_pictures
from unspool.pictures.opening import Limits, open_picture

__all__ = ["Limits", "Pictured", "open_picture", "take_pictures"]
