"""Several phrases, one of which must be written."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as copy_shallowly
from typing import TypeAlias

from unspool.constraints.base import Constraint
from unspool.constraints.token_ids import check_phrase, check_token
from unspool.errors import SettingError

MOST_PHRASES = 65_536

Node: TypeAlias = dict[int, "Node"]


class PhraseTrie:
    """Phrases that share their beginnings; a leaf is the end of one. Nothing changes it once it is made."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self.max_height = max(len(phrase) for phrase in phrases)
        self.root: Node = {}
        for phrase in phrases:
            self._insert(phrase)

    def next_tokens(self, written: Sequence[int]) -> list[int]:
        """The tokens that continue what is written, in the order in which the phrases were given."""
        return list(self._find(written))

    def reached_leaf(self, written: Sequence[int]) -> bool:
        """Whether what is written is one of the phrases."""
        return not self._find(written)

    def _find(self, written: Sequence[int]) -> Node:
        node = self.root
        for token in written:
            node = node[token]
        return node

    def _insert(self, phrase: Sequence[int]) -> None:
        node, is_new = self.root, not self.root
        for token in phrase:
            if not node and not is_new:
                raise _overlapping(phrase)  # an earlier phrase ends here
            is_new = token not in node
            node = node.setdefault(token, {})
        if not is_new:
            raise _overlapping(phrase)  # an earlier phrase is the same, or goes on from here


class DisjunctiveConstraint(Constraint):
    """The output must contain one of these phrases."""

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        if not isinstance(nested_token_ids, list) or not nested_token_ids:
            raise SettingError(
                f"`nested_token_ids` must be a non-empty list of phrases, but is {nested_token_ids!r:.200}."
            )
        if len(nested_token_ids) > MOST_PHRASES:
            raise SettingError(
                f"`nested_token_ids` has {len(nested_token_ids)} phrases; at most {MOST_PHRASES} are taken."
            )
        for phrase in nested_token_ids:
            check_phrase("nested_token_ids", phrase)
        self.trie = PhraseTrie(nested_token_ids)
        self.token_ids = nested_token_ids
        self.seqlen = self.trie.max_height
        self.current_seq: list[int] = []
        self.completed = False

    def advance(self) -> list[int] | None:
        """The tokens that go on with one of the phrases."""
        return self.trie.next_tokens(self.current_seq) or None

    def does_advance(self, token_id: int) -> bool:
        """Whether one of the phrases goes on with it."""
        check_token(token_id)
        return token_id in self.trie.next_tokens(self.current_seq)

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Step down the phrases, or fall back to their beginning."""
        if not self.does_advance(token_id):
            self.reset()
            return False, False, True
        self.current_seq.append(token_id)
        self.completed = self.trie.reached_leaf(self.current_seq)
        return True, self.completed, False

    def reset(self) -> None:
        """Go back to before the phrases."""
        self.current_seq = []
        self.completed = False

    def remaining(self) -> int:
        """How many tokens the longest of the phrases leaves to write."""
        return 0 if self.completed else self.seqlen - len(self.current_seq)

    def copy(self, stateful: bool = False) -> DisjunctiveConstraint:
        """The same phrases, with or without the progress."""
        twin = copy_shallowly(self)
        twin.current_seq = list(self.current_seq)
        if not stateful:
            twin.reset()
        return twin


def _overlapping(phrase: Sequence[int]) -> SettingError:
    return SettingError(
        f"`nested_token_ids` contains {list(phrase)!r:.200}, and another phrase that is the same, or the beginning of "
        "the other of the two: it could not be said which one was written. Keep the shorter of them."
    )
