"""Pictures of a beam search: from its trace to a tree, and from there to a terminal, an SVG or a page."""

from __future__ import annotations

from unspool.explain.page import draw_page
from unspool.explain.svg import draw_svg
from unspool.explain.terminal import draw_terminal
from unspool.explain.tree import BeamTree, Node, ReturnedText, build_tree

__all__ = ["BeamTree", "Node", "ReturnedText", "build_tree", "draw_page", "draw_svg", "draw_terminal"]
