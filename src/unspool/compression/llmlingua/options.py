"""The arguments of the compressor's calls, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from unspool.compression.llmlingua import checks
from unspool.errors import SettingError, UnsupportedError, excerpt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONDITIONS: Final = ("none", "before", "after")
_CONDITION: Final = "_condition"
_RANKS: Final = ("llmlingua", "longllmlingua", "bm25", "gzip")
# What the package ranks by with models and services of others.
_ELSEWHERE: Final = ("sentbert", "openai", "bge", "bge_reranker", "bge_llmembedder", "jinza", "voyageai", "cohere")


@dataclass(frozen=True, slots=True)
class Options:
    """What a call of `compress_prompt` asks for, besides its texts."""

    rate: float = 0.5
    target_token: float = -1
    iterative_size: int = 200
    force_context_ids: Any = None
    force_context_number: int | None = None
    use_sentence_level_filter: bool = False
    use_context_level_filter: bool = True
    use_token_level_filter: bool = True
    keep_split: bool = False
    keep_first_sentence: int = 0
    keep_last_sentence: int = 0
    keep_sentence_number: int = 0
    high_priority_bonus: float = 100
    context_budget: str = "+100"
    token_budget_ratio: float = 1.4
    condition_in_question: str = "none"
    reorder_context: str = "original"
    dynamic_context_compression_ratio: float = 0.0
    condition_compare: bool = False
    add_instruction: bool = False
    rank_method: str = "llmlingua"
    concate_question: bool = True
    strict_preserve_uncompressed: bool = True

    def __post_init__(self) -> None:
        checks.check_number("rate", self.rate, 0, 1)
        checks.check_target(self.target_token)
        checks.check_count("iterative_size", self.iterative_size, 1)
        for name in ("keep_first_sentence", "keep_last_sentence", "keep_sentence_number"):
            checks.check_count(name, getattr(self, name), 0)
        if self.force_context_number is not None:
            checks.check_count("force_context_number", self.force_context_number, 0)
        for name in _SWITCHES:
            checks.check_switch(name, getattr(self, name))
        checks.check_number("high_priority_bonus", self.high_priority_bonus, -1e9, 1e9)
        checks.check_number("token_budget_ratio", self.token_budget_ratio, 0, 1e6)
        checks.check_number("dynamic_context_compression_ratio", self.dynamic_context_compression_ratio, -1, 1)
        checks.read_budget(self.context_budget, 0)
        if not isinstance(self.reorder_context, str):
            raise SettingError(
                f"`reorder_context`={excerpt(self.reorder_context)} is 'original', 'two_stage' or 'sort'"
            )
        if self.rank_method in _ELSEWHERE:
            raise UnsupportedError(
                f"`rank_method`={self.rank_method!r} ranks with another's model or service; rank the contexts yourself "
                f"and leave the filter off, or use one of {', '.join(map(repr, _RANKS))}"
            )
        checks.check_choice("rank_method", self.rank_method, _RANKS)
        known = [*CONDITIONS, *(f"{name}{_CONDITION}" for name in CONDITIONS)]
        checks.check_choice("condition_in_question", self.condition_in_question, known)

    @property
    def puts_question_first(self) -> bool:
        """Whether the token filter reads the question before the contexts."""
        return self.condition_compare or self.condition_in_question.endswith(_CONDITION)

    @property
    def condition(self) -> str:
        """Where the question stands when contexts are ranked: "none", "before" or "after" them."""
        asked = self.condition_in_question.removesuffix(_CONDITION)
        if self.rank_method == "llmlingua":
            return "none"
        # Asked for with a condition, "none" stays as it is.
        if self.rank_method == "longllmlingua" and asked == "none" and not self.puts_question_first:
            return "after"
        return asked


Given = TypeVar("Given", bound="DataclassInstance")


def pick(kind: type[Given], given: Mapping[str, Any]) -> Given:
    """The options of a kind out of a call's arguments."""
    return kind(**{field.name: given[field.name] for field in fields(kind)})


def refuse_unread(given: Mapping[str, Any], theirs: type[Any], ours: type[Any], why: str) -> None:
    """Raise for an argument that is of another method's options alone, and is not their default."""
    own = {field.name for field in fields(ours)}
    for field in fields(theirs):
        value = given[field.name]
        value = tuple(value) if isinstance(value, list) else value
        if field.name not in own and value != field.default:
            raise SettingError(f"`{field.name}`={excerpt(given[field.name])} was given, and {why}")


_SWITCHES: Final = (
    "use_sentence_level_filter",
    "use_context_level_filter",
    "use_token_level_filter",
    "keep_split",
    "condition_compare",
    "add_instruction",
    "concate_question",
    "strict_preserve_uncompressed",
)
