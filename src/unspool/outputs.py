"""Results: the reference's output classes, and the short way's `Generation`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NoReturn, SupportsIndex, overload

import torch

from unspool.errors import UnfulfilledError

StepTensors = tuple[torch.Tensor, ...]  # one per step
StepLayers = tuple[StepTensors, ...]  # one tuple per step, with one tensor per layer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model (before processors), and the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Speculation:
    """Statistics of a drafter, one number per row: tokens drafted, tokens accepted, and passes that checked any."""

    drafted: list[int]
    accepted: list[int]
    checks: list[int]

    @classmethod
    def of_rows(cls, num_rows: int) -> Speculation:
        """Nothing drafted yet."""
        return cls(*([0] * num_rows for _ in range(3)))

    def add(self, row: int, num_drafted: int, num_accepted: int) -> None:
        """Count one pass of a row."""
        self.drafted[row] += num_drafted
        self.accepted[row] += num_accepted
        self.checks[row] += num_drafted > 0

    @property
    def mean_accepted_length(self) -> float:
        """Drafted tokens accepted per check, over all rows."""
        return sum(self.accepted) / max(1, sum(self.checks))

    @property
    def mean_accepted_lengths(self) -> list[float]:
        """The same, one number per row."""
        return [accepted / max(1, checks) for accepted, checks in zip(self.accepted, self.checks, strict=True)]

    @property
    def acceptance(self) -> float:
        """The fraction of drafted tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.drafted))


@dataclass(slots=True)
class Stats:
    """The cost of a call."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, read before: in a prefix, a cache that was given, an engine's shared blocks
    new_tokens: int = 0
    forward_passes: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    path: str = "eager"  # or "captured" (a CUDA graph), "library" (one call of C), "compiled": how the steps were run
    path_reason: str = ""  # why they were not faster, if that is known
    speculation: Speculation | None = None  # if there was a drafter

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second after the first, all rows together."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else 0.0


@dataclass(init=False, repr=False, eq=False)
class Output(OrderedDict[str, Any]):
    """A dataclass that can also be read as a dictionary and as a tuple; fields that are None are in neither."""

    _attributes_only: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for item in fields(self):
            self._enter(item.name, getattr(self, item.name))

    def _enter(self, name: str, value: Any) -> None:
        if value is None:
            OrderedDict.pop(self, name, None)
        elif name not in self._attributes_only:
            OrderedDict.__setitem__(self, name, value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return OrderedDict.__getitem__(self, key)
        return self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in {item.name for item in fields(self)}:
            self._enter(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} keeps its fields; set one to None to take it out")

    __delitem__ = setdefault = pop = update = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), {item.name: getattr(self, item.name) for item in fields(self)})

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in their order."""
        names = (item.name for item in fields(self))
        return tuple(OrderedDict.__getitem__(self, name) for name in names if name in self)


def _restore(kind: type[Output], values: dict[str, Any]) -> Output:
    return kind(**values)


class GenerateOutput(Output):
    """What every output of `generate()` has; the classes below add their fields, in the reference's order."""

    _attributes_only = frozenset({"stats"})

    sequences: torch.Tensor | None
    stats: Stats | None

    @property
    def speculation(self) -> Speculation | None:
        """Statistics of the drafter, if there was one."""
        return None if self.stats is None else self.stats.speculation


@dataclass
class GenerateDecoderOnlyOutput(GenerateOutput):
    """What a decoder-only model generated without beams."""

    sequences: torch.Tensor | None = None
    scores: StepTensors | None = None
    logits: StepTensors | None = None
    attentions: StepLayers | None = None
    hidden_states: StepLayers | None = None
    past_key_values: Any = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob | None]] | None = None
    dola_layers: list[list[int]] | None = None  # the layer that each new token was contrasted with, if DoLa chose it
    stats: Stats | None = None


@dataclass
class GenerateEncoderDecoderOutput(GenerateOutput):
    """What an encoder-decoder model generated without beams."""

    sequences: torch.Tensor | None = None
    scores: StepTensors | None = None
    logits: StepTensors | None = None
    encoder_attentions: StepTensors | None = None
    encoder_hidden_states: StepTensors | None = None
    decoder_attentions: StepLayers | None = None
    cross_attentions: StepLayers | None = None
    decoder_hidden_states: StepLayers | None = None
    past_key_values: Any = None
    logprobs: list[list[TokenLogprob]] | None = None
    stats: Stats | None = None


@dataclass
class GenerateBeamDecoderOnlyOutput(GenerateOutput):
    """What a decoder-only model generated with beams."""

    sequences: torch.Tensor | None = None
    sequences_scores: torch.Tensor | None = None
    scores: StepTensors | None = None
    logits: StepTensors | None = None
    beam_indices: torch.Tensor | None = None
    attentions: StepLayers | None = None
    hidden_states: StepLayers | None = None
    past_key_values: Any = None
    prompt_logprobs: list[list[TokenLogprob | None]] | None = None
    beam_trace: Any = None  # a BeamTrace, where return_beam_trace asked for one
    stats: Stats | None = None


@dataclass
class GenerateBeamEncoderDecoderOutput(GenerateOutput):
    """What an encoder-decoder model generated with beams."""

    sequences: torch.Tensor | None = None
    sequences_scores: torch.Tensor | None = None
    scores: StepTensors | None = None
    logits: StepTensors | None = None
    beam_indices: torch.Tensor | None = None
    encoder_attentions: StepTensors | None = None
    encoder_hidden_states: StepTensors | None = None
    decoder_attentions: StepLayers | None = None
    cross_attentions: StepLayers | None = None
    decoder_hidden_states: StepLayers | None = None
    past_key_values: Any = None
    beam_trace: Any = None  # a BeamTrace, where return_beam_trace asked for one
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that a model calls."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Generation:
    """The short way's answer: texts and tokens, one per row, and the cost.

    It is also the sequence of its texts: `len()`, iteration, an index or a slice.
    """

    texts: list[str]
    token_ids: list[list[int]]  # new tokens only
    prompt_token_ids: list[list[int]]
    finish_reasons: list[str]  # "eos", "length", "time", "stop_string", "repetition", "criteria"
    stats: Stats
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob | None]] | None = None
    beam_trace: Any = field(default=None, repr=False)  # a BeamTrace, where return_beam_trace asked for one
    dola_layers: list[list[int]] | None = field(default=None, repr=False)  # the layer each token was contrasted with
    segments: list[list[dict[str, Any]]] | None = field(default=None, repr=False)  # of speech read window by window
    output: GenerateOutput | None = field(default=None, repr=False)  # scores, hidden states …, if asked for
    readers: list[Callable[[str], Any] | None] | None = field(default=None, repr=False)  # of structured texts
    calls: list[list[ToolCall]] | None = field(default=None, repr=False)  # of tools, one list per row, if there are any
    thoughts: list[str] | None = field(default=None, repr=False)  # what was thought before each text, if set apart
    num_thinking_tokens: list[int] | None = field(default=None, repr=False)  # of each row's new tokens

    @property
    def thought(self) -> str:
        """What was thought before the first row's text."""
        return "" if self.thoughts is None else self.thoughts[0]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The first row's tool calls."""
        return [] if self.calls is None else self.calls[0]

    @property
    def parsed(self) -> Any:
        """The value of the first row's structured text: of the given type, or as JSON has it; else the text."""
        return self.parse(0)

    def parse(self, row: int) -> Any:
        """The value of a row's structured text; raises if the text was cut off before its end."""
        read = self.readers[row] if self.readers is not None else None
        if read is None:
            raise UnfulfilledError(
                f"row {row} has no structure to be read back; ask for one with json_schema, json_object, regex, choice "
                "or grammar"
            )
        reason = self.finish_reasons[row]
        if reason not in ("eos", "stop_string"):
            raise UnfulfilledError(
                f"the structured text of row {row} ended by {reason!r} after {len(self.token_ids[row])} tokens, before "
                "it was whole; raise max_new_tokens or max_time"
            )
        try:
            return read(self.texts[row])
        except ValueError as error:
            raise UnfulfilledError(f"the text of row {row} is not whole, or not what was asked for: {error}") from error

    @property
    def text(self) -> str:
        """The first row's text."""
        return self.texts[0]

    @property
    def speculation(self) -> Speculation | None:
        """Statistics of the drafter, if there was one."""
        return self.stats.speculation

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    @overload
    def __getitem__(self, row: SupportsIndex) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: SupportsIndex | slice) -> str | list[str]:
        return self.texts[row]

    def __contains__(self, text: object) -> bool:
        return text in self.texts

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(self.texts)
