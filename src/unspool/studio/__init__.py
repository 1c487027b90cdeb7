"""The studio: the page of a server, on which decoding is watched. Static files, and one page for keeping a run."""

from unspool.studio.files import Asset, find_asset
from unspool.studio.policy import PAGE_HEADERS
from unspool.studio.single_page import build_single_page

__all__ = ["PAGE_HEADERS", "Asset", "build_single_page", "find_asset"]
