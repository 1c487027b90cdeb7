"""From a trace to a tree of tokens: candidates, beams, finished and returned sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unspool.decoding.beams.trace import BeamTrace, Candidate, TraceStep
from unspool.errors import InputError

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8  # tokens before one that its text may depend on
_UNFINISHED = "\ufffd"


@dataclass(slots=True, eq=False)
class Node:
    """A candidate in the tree: its token, its parent, and what happened to it."""

    token: int
    text: str
    step: int
    group: int
    logprob: float  # of the token after its parent, as the search counted it
    sum_logprobs: float
    parent: Node | None = field(repr=False)
    is_kept: bool = False  # it became a beam
    reason: str | None = None  # why its sequence ended here
    score: float | None = None  # its sequence's, if it is among the finished ones
    ranks: list[int] = field(default_factory=list)  # of the returned sequences that it is part of, from 1 on
    children: list[Node] = field(default_factory=list, repr=False)

    @property
    def is_returned(self) -> bool:
        """Whether it is part of a sequence that was returned."""
        return bool(self.ranks)

    @property
    def is_finished(self) -> bool:
        """Whether its sequence ended here and was among the best so far."""
        return self.score is not None

    @property
    def is_dropped(self) -> bool:
        """Whether it was dropped."""
        return not (self.is_kept or self.is_finished or self.is_returned)

    def path(self) -> list[Node]:
        """The nodes from the first token to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class ReturnedText:
    """A sequence that was returned."""

    rank: int
    text: str
    score: float
    reason: str
    node: Node


@dataclass(slots=True)
class BeamTree:
    """One prompt's search as a tree."""

    prompt: str
    num_beams: int
    num_groups: int
    roots: list[Node]
    steps: list[list[Node]]  # the nodes of each step, as the search ranked them
    returned: list[ReturnedText]  # the best first

    def nodes(self) -> Iterator[Node]:
        """Every node, step by step."""
        return (node for step in self.steps for node in step)


def build_tree(
    trace: BeamTrace, decode: Decode, *, prompt: int = 0, prompt_text: str = "", prompt_ids: Sequence[int] = ()
) -> BeamTree:
    """The tree of one prompt's search; `decode` turns ids into text, special tokens included.

    `prompt_ids` are the context of the first token's text. Beams that never existed are left out.
    """
    own = [step for step in trace.steps if step.prompt == prompt]
    if not own:
        raise InputError(f"the trace has no prompt {prompt}; it has {trace.num_prompts}, counted from 0")
    grower = _Grower(trace, decode, list(prompt_ids)[-_CONTEXT:])
    for step in own:
        grower.grow(step)
    returned = []
    for rank, end in enumerate((one for one in trace.returned if one.prompt == prompt), start=1):
        node = grower.placed[end.step, end.group][end.place]
        node.reason = node.reason or end.reason
        node.score = end.score
        path = node.path()
        for passed in path:
            passed.ranks.append(rank)
        text = decode([passed.token for passed in path])
        returned.append(ReturnedText(rank, text, end.score, end.reason, node))
    return grower.finish(prompt_text, returned)


def rank_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The returned ones first, by rank, then by probability."""
    return sorted(nodes, key=lambda node: (min(node.ranks, default=1 << 30), -node.sum_logprobs))


class _Grower:
    def __init__(self, trace: BeamTrace, decode: Decode, context: list[int]) -> None:
        self._trace, self._decode, self._context = trace, decode, context
        self._size = trace.num_beams // trace.num_groups
        self._beams: list[Node | None] = [None] * trace.num_beams
        self.placed: dict[tuple[int, int], list[Node]] = {}

    def grow(self, step: TraceStep) -> None:
        """Append a step's candidates to the beams they continue; those kept are the next beams."""
        kept = set(step.kept)
        nodes = [
            self._make(step, one, place in kept, step.finished.get(place)) for place, one in enumerate(step.candidates)
        ]
        self.placed[step.step, step.group] = nodes
        first = step.group * self._size
        self._beams[first : first + len(step.kept)] = [nodes[place] for place in step.kept]

    def _make(self, step: TraceStep, one: Candidate, is_kept: bool, score: float | None) -> Node:
        parent = self._beams[one.parent]
        before = 0.0 if parent is None else parent.sum_logprobs
        # A finished beam continues only if there are too few others: what follows it is not part of any sequence.
        is_kept = is_kept and one.reason is None
        logprob = one.sum_logprobs - before if math.isfinite(before) else -math.inf
        text = "" if one.sum_logprobs == -math.inf else self._read(one.token, parent)
        return Node(
            one.token, text, step.step, step.group, logprob, one.sum_logprobs, parent, is_kept, one.reason, score
        )

    def _read(self, token: int, parent: Node | None) -> str:
        """The text that a token adds to what is before it; its own text if that is not clear."""
        path = [] if parent is None else [node.token for node in parent.path()[-_CONTEXT:]]
        before = (self._context + path)[-_CONTEXT:]
        start = self._decode(before) if before else ""
        whole = self._decode([*before, token])
        if whole.startswith(start) and not start.endswith(_UNFINISHED) and not whole.endswith(_UNFINISHED):
            return whole[len(start) :]
        return self._decode([token])

    def finish(self, prompt_text: str, returned: list[ReturnedText]) -> BeamTree:
        """Leave out candidates that never existed, and link parents to children."""
        trace = self._trace
        steps: list[list[Node]] = [[] for _ in range(max(step for step, _ in self.placed))]
        roots: list[Node] = []
        for (step, _), nodes in sorted(self.placed.items()):
            for node in nodes:
                if node.sum_logprobs == -math.inf and not node.is_returned:
                    continue
                steps[step - 1].append(node)
                (roots if node.parent is None else node.parent.children).append(node)
        return BeamTree(prompt_text, trace.num_beams, trace.num_groups, roots, steps, returned)
