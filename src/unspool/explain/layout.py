"""The layout of the picture: a column for each step, children beside their parents, no lines crossing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unspool.explain.tree import BeamTree, Node, rank_nodes
from unspool.explain.wording import measure, shorten, show_token, write_number, write_probability

CHARACTER, SMALL_CHARACTER = 7.85, 6.65  # widths of the two sizes of letters
HEIGHT, ROW = 23.0, 30.0  # of a box, and from one to the next
GAP = 40.0  # between columns, for the lines
PADDING = 9.0
LONGEST_TOKEN = 18


@dataclass(slots=True)
class Box:
    """A node with its coordinates; `y` is its middle."""

    node: Node
    number: int
    label: str
    share: str
    badge: str
    width: float
    x: float = 0.0
    y: float = 0.0


@dataclass(slots=True)
class Layout:
    """All boxes, by step, and their total size."""

    columns: list[list[Box]]
    lefts: list[float]  # of each column
    widths: list[float]
    root_y: float
    height: float
    width: float
    hidden: list[int]  # candidates of each step that are not drawn
    boxes: dict[int, Box] = field(default_factory=dict)  # by id() of the node


def arrange(tree: BeamTree, left: float, *, most_dropped: int) -> Layout:
    """Place every node that is drawn; `left` is where the first column begins."""
    columns, hidden, boxes = _choose(tree, most_dropped)
    lefts, widths, x = [], [], left
    for column in columns:
        width = max((box.width for box in column), default=0.0)
        for box in column:
            box.x = x
        lefts.append(x)
        widths.append(width)
        x += width + GAP
    for column in columns:
        _stack(column, boxes)
    all_boxes = [box for column in columns for box in column]
    top = min((box.y for box in all_boxes), default=0.0)
    for box in all_boxes:
        box.y += HEIGHT / 2 - top
    bottom = max((box.y for box in all_boxes), default=0.0) + HEIGHT / 2
    return Layout(columns, lefts, widths, HEIGHT / 2 - top, bottom, x - GAP, hidden, boxes)


def _choose(tree: BeamTree, most_dropped: int) -> tuple[list[list[Box]], list[int], dict[int, Box]]:
    """The nodes drawn of each step, in their parents' order: beams, and the most likely of the others."""
    columns: list[list[Box]] = []
    hidden: list[int] = []
    boxes: dict[int, Box] = {}
    parents: list[Sequence[Node]] = [tree.roots]
    for step in tree.steps:
        dropped = sorted((node for node in step if node.is_dropped), key=lambda node: -node.sum_logprobs)
        left_out = {id(node) for node in dropped[most_dropped:]}
        hidden.append(len(left_out))
        ordered = [
            node
            for siblings in parents
            for node in sorted(rank_nodes(siblings), key=lambda node: node.is_dropped)
            if id(node) not in left_out
        ]
        column = [_make_box(node, len(boxes) + place) for place, node in enumerate(ordered)]
        boxes |= {id(box.node): box for box in column}
        columns.append(column)
        parents = [node.children for node in ordered]
    return columns, hidden, boxes


def _make_box(node: Node, number: int) -> Box:
    label = shorten(show_token(node.text), LONGEST_TOKEN)
    share = write_probability(node.logprob)
    badge = ""
    if node.is_finished and node.reason is not None:
        badge = f"{f'#{node.ranks[0]} ' if node.is_returned else ''}{write_number(node.score or 0.0)}"
    width = 2 * PADDING + measure(label) * CHARACTER + 7 + len(share) * SMALL_CHARACTER
    return Box(node, number, label, share, badge, width + (len(badge) * SMALL_CHARACTER + 14 if badge else 0.0))


def _stack(column: list[Box], boxes: dict[int, Box]) -> None:
    """Put each box as close to its parent as its neighbours allow, keeping their order."""
    wanted: list[float] = []
    weights: list[float] = []
    seen: dict[int, int] = {}
    for box in column:
        parent = box.node.parent
        key = 0 if parent is None else id(parent)
        place = seen[key] = seen.get(key, -1) + 1  # the first child is beside its parent
        wanted.append((0.0 if parent is None else boxes[key].y) + place * ROW)
        weights.append(_weigh(box.node))
    for box, y in zip(column, spread(wanted, weights, ROW), strict=True):
        box.y = y


def _weigh(node: Node) -> float:
    """The weight of keeping a node's line straight."""
    if node.is_returned:
        return 1000.0 if 1 in node.ranks else 8.0
    return 0.5 if node.is_dropped else 1.0


def spread(wanted: Sequence[float], weights: Sequence[float], gap: float) -> list[float]:
    """The positions closest to the wanted ones (weighted least squares) that keep their order and a gap between them.

    Apart from the gap this is isotonic regression, solved by pooling adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for place, (value, weight) in enumerate(zip(wanted, weights, strict=True)):
        mean, total, count = value - place * gap, weight, 1
        while pools and pools[-1][0] > mean:
            other_mean, other, more = pools.pop()
            mean, total, count = (mean * total + other_mean * other) / (total + other), total + other, count + more
        pools.append((mean, total, count))
    flat = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + place * gap for place, mean in enumerate(flat)]
