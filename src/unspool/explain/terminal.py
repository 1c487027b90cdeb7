"""A beam search drawn with characters: a line for every beam, what was dropped in one faint line under its parent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from unspool.explain.tree import BeamTree, Node, rank_nodes
from unspool.explain.wording import (
    measure,
    shorten,
    shorten_front,
    show_text,
    show_token,
    wrap,
    write_number,
    write_probability,
)

Role = Literal["heading", "best", "returned", "kept", "dropped"]
Paint = Callable[[str, Role], str]
NARROWEST, WIDEST = 40, 240
MOST_DROPPED = 4  # shown of those under one parent
MOST_LINES = 4  # of a returned sequence
_NUMBERS = 17  # columns of the two numbers at the right
_LEGEND: tuple[tuple[str, Role], ...] = (
    ("● returned", "best"),
    ("○ kept for a while", "kept"),
    ("■ finished", "kept"),
    ("┆ dropped at once", "dropped"),
)


def draw_terminal(
    tree: BeamTree, width: int = 80, paint: Paint = lambda text, _role: text, *, most_dropped: int = MOST_DROPPED
) -> str:
    """The tree and the sequences returned, in lines of at most `width` columns; `paint` may colour a part."""
    drawing = _Drawing(max(NARROWEST, min(width, WIDEST)), paint, most_dropped)
    drawing.draw_tree(tree)
    drawing.draw_returned(tree)
    return "\n".join(drawing.lines) + "\n"


class _Drawing:
    def __init__(self, width: int, paint: Paint, most_dropped: int) -> None:
        self._width, self._paint, self._most_dropped = width, paint, most_dropped
        self._has_groups = False
        self.lines: list[str] = []

    def draw_tree(self, tree: BeamTree) -> None:
        room = self._width - _NUMBERS
        prompt = shorten_front(show_text(tree.prompt) or "(prompt)", room - 1)
        titles = f"{'token':>8}{'total':>9}"
        self._add([(_fill(prompt, room), "heading"), (titles, "dropped")])
        self._has_groups = tree.num_groups > 1
        alive, remark = self._split(tree.roots)
        self._remark("", remark)
        waiting = self._branch("", alive)[
            ::-1
        ]  # an explicit stack: the depth of a tree must not be limited by Python's recursion limit
        while waiting:
            node, head, body = waiting.pop()
            self._draw_node(node, head)
            alive, remark = self._split(node.children)
            self._remark(body, remark)
            waiting += self._branch(body, alive)[::-1]

    def draw_returned(self, tree: BeamTree) -> None:
        self.lines.append("")
        self._draw_legend()
        self.lines.append("")
        for one in tree.returned:
            head = f"{one.rank:>3}  {write_number(one.score):>7}  {one.reason:<11} "
            role: Role = "best" if one.rank == 1 else "returned"
            lines = wrap(show_text(one.text).lstrip(), self._width - measure(head), MOST_LINES)
            for place, text in enumerate(lines):
                self._add([(" " * measure(head) if place else head, "kept"), (text, role)])

    def _draw_legend(self) -> None:
        parts: list[tuple[str, Role]] = []
        for text, role in _LEGEND:
            if parts and sum(measure(part) for part, _ in parts) + measure(text) > self._width:
                self._add(parts)
                parts = []
            parts += [(text, role), ("   ", role)]
        self._add(parts)

    def _branch(self, body: str, nodes: list[Node]) -> list[tuple[Node, str, str]]:
        """Each node with the prefixes of its line and of its children's lines; an only child continues its parent's."""
        if len(nodes) == 1 and body:
            return [(nodes[0], body, body)]
        last = len(nodes) - 1
        return [
            (node, body + ("└─" if place == last else "├─"), body + ("  " if place == last else "│ "))
            for place, node in enumerate(nodes)
        ]

    def _split(self, nodes: list[Node]) -> tuple[list[Node], list[Node]]:
        ranked = rank_nodes(nodes)
        return [node for node in ranked if not node.is_dropped], [node for node in ranked if node.is_dropped]

    def _draw_node(self, node: Node, head: str) -> None:
        role: Role = "best" if 1 in node.ranks else "returned" if node.is_returned else "kept"
        mark = "●" if node.is_returned else "■" if node.is_finished else "○"
        head = self._fit(head)
        room = self._width - _NUMBERS - measure(head) - 2
        note = _describe(node, self._has_groups)
        token = shorten(show_token(node.text), max(1, room - measure(note)))
        parts = [(head, "dropped"), (f"{mark} {token}", role)]
        if note:
            parts.append((shorten(note, room - measure(token)), "heading" if node.is_returned else "kept"))
        parts.append((" " * (room - sum(measure(text) for text, _ in parts[1:]) + 2), "kept"))
        numbers = f"{write_probability(node.logprob):>8}{write_number(node.sum_logprobs):>9}"
        self._add([*parts, (numbers, "kept" if node.is_returned else "dropped")])

    def _remark(self, body: str, nodes: list[Node]) -> None:
        """One line for the dropped candidates."""
        if not nodes:
            return
        line = self._fit(body) + "┆ "
        for place, node in enumerate(nodes):
            rest = len(nodes) - place
            candidate = f"{shorten(show_token(node.text), 16)} {write_probability(node.logprob)}"
            more = f"  +{rest - 1} more" if rest > 1 else ""
            if place and (place >= self._most_dropped or measure(line + candidate + more) > self._width):
                line += f"+{rest} more"
                break
            line += candidate + "   "
        self._add([(shorten(line.rstrip(), self._width), "dropped")])

    def _fit(self, prefix: str) -> str:
        most = self._width // 2
        return prefix if len(prefix) <= most else "…" + prefix[1 - most :]

    def _add(self, parts: Sequence[tuple[str, Role]]) -> None:
        while parts and not parts[-1][0].strip():
            parts = parts[:-1]
        self.lines.append("".join(self._paint(text, role) if text.strip() else text for text, role in parts))


def _describe(node: Node, has_groups: bool) -> str:
    notes = []
    if has_groups and node.parent is None:
        notes.append(f"group {node.group + 1}")
    if node.is_finished and node.reason is not None:
        rank = f"#{node.ranks[0]} " if node.is_returned and not node.children else ""
        notes.append(f"{rank}{node.reason} {write_number(node.score or 0.0)}")
    return f"  ← {', '.join(notes)}" if notes else ""


def _fill(text: str, width: int) -> str:
    return text + " " * (width - measure(text))
