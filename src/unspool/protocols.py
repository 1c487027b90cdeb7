"""What a model is to the rest of unspool. Strategies know these types and nothing of any real model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from unspool.cache import Cache
    from unspool.config import CompileConfig
    from unspool.kernels.token_choice import TokenChoice

LayerKind = Literal["full", "sliding", "state"]  # a "state" layer attends to nothing: it remembers


@dataclass(frozen=True)
class FeatureShape:
    """What an encoder of sound reads: features (rows, channels, frames), of which `stride` frames make a position."""

    channels: int
    frames: int
    stride: int

    @property
    def positions(self) -> int:
        """Positions of the encoder's states."""
        return self.frames // self.stride


@dataclass(frozen=True)
class ModelInfo:
    """What a model says of itself. Everything else asks here, never for a class name."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_context: int | None = None  # longest context; None if positions have no bound
    ends_at_context: bool = True  # positions lie in a table of `max_context`; else later ones are computed as all are
    window: int | None = None  # keys a "sliding" layer sees
    layer_kinds: tuple[LayerKind, ...] = ()
    is_encoder_decoder: bool = False
    has_tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    source_vocab_size: int | None = None  # of an encoder, if it differs from `vocab_size`
    embedding_size: int | None = None  # numbers to a token's embedding, if it differs from `hidden_size`
    longest_source: int | None = None  # positions that an encoder reads at most; None if there is no bound
    features: FeatureShape | None = None  # what its encoder reads instead of tokens; None: it reads tokens
    uncounted_id: int | None = None  # a token that has a position in no text's first pass, though it has in later ones
    why_single: str = ""  # why it reads one token a pass behind its prompt, and no drafts; empty: it reads any number
    why_even: str = ""  # why all rows of a batch must grow alike, so that drafts are for one row; empty: they need not
    why_apart: str = ""  # why its layers' keys can't lie in one pool of blocks; empty: they can
    why_placed: str = ""  # why every row of a call keeps its place to the end; empty: rows leave, others are tried
    # "branches": attention reads a BranchingCache, whose rows share their prompt's keys; "forks": it reads a cache
    # whose `num_forks` is above 1; "last_states", "early_logits", "early_exit": what `Want` asks for under these names;
    # "compile": it is `Compilable`; "stretches": it is `Stretching`; "shifted_keys": keys can be moved to other
    # positions once they were made (rotary, ALiBi); "borrowed_states": its decoder reads the states of another model's
    # encoder, for it has none; "whole_prompts": it reads a prompt in one pass, and in no pieces
    can: frozenset[str] = frozenset({"hidden_states", "attentions", "inputs_embeds", "last_states"})


def name_sizes(info: ModelInfo) -> str:
    """What a model says of itself, except for `can`: it may grow, and the order of a set differs between processes."""
    return repr(replace(info, can=frozenset()))


class Epilogue(Protocol):
    """What a strategy does with a pass right after it, for passes that can do it themselves, as captured graphs do.

    Whoever asks for one has the same in torch, and uses that where `Forward.epilogue` is None.
    """

    @property
    def key(self) -> Hashable:
        """What a captured graph is made for: epilogues with equal keys can use one graph."""
        ...

    def fits(self, num_new: int, num_forks: int) -> bool:
        """Whether it can follow a pass over `num_new` tokens per row, or `num_forks` candidates for one position."""
        ...


@dataclass(frozen=True, slots=True)
class Want:
    """What a forward pass is to return."""

    logits: Literal["last", "all"] = "last"
    hidden_states: bool = False
    attentions: bool = False
    last_states: bool = False  # the final states that the head reads, of every new position
    early: tuple[int, ...] = ()  # which of the `hidden_states` are to be read by the head too
    exit_layer: int | None = None  # only the first so many layers run, then the head (models that can "early_exit")
    epilogue: Epilogue | None = None  # what follows the pass; one that does it sets `Forward.epilogue`
    # What is returned is read at once, by one thread and without changing it: it may be overwritten by the next pass.
    is_brief: bool = False
    # Nobody reads the logits of a pass that finds the likeliest tokens: it may find them in another way, and return
    # logits without columns.
    likeliest_only: bool = False
    finds_likeliest: bool = True  # False: nobody reads `Forward.likeliest`


LAST = Want()


class TokenLog(Protocol):
    """What brief steps chose, where a device wrote it: kept for some steps, so that nobody has to copy every one."""

    num_logged: int  # steps that were taken
    most_logged: int  # of which so many are kept

    def read_log(self, last: int, count: int) -> torch.Tensor:
        """What `count` steps chose (rows, steps), of which the last was the step of that number, from 1 on."""
        ...


@dataclass(slots=True)
class Forward:
    """What a forward pass returned."""

    logits: torch.Tensor  # (rows, vocab) for "last"; (rows, new, vocab) for "all"; (rows, 0) if `likeliest_only` let it
    hidden_states: tuple[torch.Tensor, ...] | None = None  # embeddings, then one per layer: (rows, new, hidden)
    attentions: tuple[torch.Tensor, ...] | None = None  # one per layer: (rows, heads, new, keys)
    cross_attentions: tuple[torch.Tensor, ...] | None = None  # one per layer: (rows, heads, new, source)
    last_states: torch.Tensor | None = None  # (rows, new, hidden)
    early_logits: tuple[torch.Tensor, ...] | None = None  # a layer of `Want.early` each: (rows, vocab), last position
    # (rows,) or (rows, new), as the logits are: the first token of the highest one, if the pass found it
    likeliest: torch.Tensor | None = None
    # (rows, 1): the likeliest tokens where the next pass reads them; given to it as they are, they are not copied
    fed: torch.Tensor | None = None
    log: TokenLog | None = None  # holds the likeliest tokens of a pass that `fed` them
    epilogue: Any = None  # what `Want.epilogue` gave, if the pass did it itself; `likeliest` is by its scores then
    # Whether states and weights are in the columns that the caller gave and need no more padding.
    is_laid_out: bool = False
    state_rows: int = 0  # the dimension of the rows where hidden states have four: streams stand before or behind
    path: str = "eager"  # or "captured" (a CUDA graph), "library" (one call of C), "compiled": how the pass was run
    path_reason: str = ""  # why it was not faster, if that is known


@dataclass(slots=True)
class Encoded:
    """What an encoder returned: right-filled states, and how much of each row is real."""

    states: torch.Tensor  # (rows, source, hidden)
    lengths: list[int]
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedRows:
    """The decoder's prompt where a model makes it of inputs of its own (images, sound, another model's cache)."""

    ids: torch.Tensor  # (rows, width), left-padded; width 0 if only embeddings were given
    lengths: list[int]  # positions that each row takes in the decoder
    shown: torch.Tensor  # (rows, columns): what returned sequences begin with
    embeds: torch.Tensor | None = None  # (rows, longest, hidden), instead of tokens
    source_ids: torch.Tensor | None = None  # the encoder's tokens, if it reads any
    num_sources: int = 0  # rows that the encoder reads; 0 without an encoder
    num_hidden: int = 0  # columns of embeddings that were given without ids, padding among them
    end: int | None = None  # columns, the prompt's among them, at which every text ends by the model's own rule


class Model(Protocol):
    """A model: what it is, and one forward pass. A twenty-line fake satisfies it."""

    info: ModelInfo

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Cache:
        """An empty cache for `rows` rows. An encoder-decoder projects `encoded` into it here, once.

        `config` is what `cache_config` says, checked already.
        """
        ...

    def forward(
        self,
        tokens: torch.Tensor | None,  # (rows, new) int64, right-filled
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,  # (rows, new, hidden), instead of tokens
    ) -> Forward:
        """Read each row's first `counts[row]` new tokens after what the cache holds, and advance the cache.

        `counts=None` means that all `new` tokens of every row are real. "last" logits are those of
        position `counts[row] - 1`.
        """
        ...

    def encode(
        self,
        tokens: torch.Tensor | None,
        counts: Sequence[int] | None = None,
        *,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Encoded:
        """Run the encoder over right-filled rows (encoder-decoder models only).

        `embeds` are embeddings (rows, source, hidden), or features (rows, channels, frames) if `info.features` is set.
        """
        ...


@dataclass(slots=True)
class Ask:
    """One question to a model: what follows these tokens, read after what the cache holds? `Forward` is the answer."""

    model: Model
    cache: Cache
    tokens: torch.Tensor | None  # (rows, new) int64, right-filled
    counts: Sequence[int] | None = None  # how many of the new tokens are real, one per row; None: all
    want: Want = LAST
    embeds: torch.Tensor | None = None  # (rows, new, hidden), instead of tokens


@dataclass(slots=True)
class SourceAsk:
    """One question to a model's encoder: what does it make of these sources? `Encoded` is the answer."""

    model: Model
    tokens: torch.Tensor | None  # (rows, source) int64, right-filled
    counts: Sequence[int]  # how many of them are real, one per row
    want: Want = LAST
    embeds: torch.Tensor | None = None  # embeddings or features, instead of tokens: see `Model.encode`


Answer = Callable[[Ask], Forward]
"""Answers an ask: at once, or after waiting for a pass that several runs share."""
SourceAnswer = Callable[[SourceAsk], Encoded]
"""The same for what is asked of an encoder."""


@dataclass(slots=True)
class Stretch:
    """What several greedy steps in one call chose."""

    steps: list[list[int]]  # the likeliest token of every row, one per step; -1 if a row has none, in the last only
    path: str  # as in `Forward`


Choose = Callable[[list[int], torch.Tensor], list[int]]
"""From each row's likeliest token, -1 if it has none, and the logits (rows, vocab) to the token that each row gets."""


class Stretching(Model, Protocol):
    """A model that says "stretches" in `info.can`: it can take several steps in one call."""

    def take_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        num_steps: int,
        ends: tuple[int, ...],
        choose: Choose | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> Stretch | None:
        """Read each row's last token after what the cache holds, then each step's likeliest one, or what `choose` makes
        of it. The logits of tokens that are forbidden are -inf.

        It ends after `num_steps`, or with the step in which a row gets one of the `ends`. Keys are written past the
        rows' lengths, which stay as they are: `cache.advance` counts a step's as held. None if steps must be taken
        one by one.
        """
        ...

    def launch_steps(
        self, tokens: torch.Tensor, cache: Cache, num_steps: int, choice: TokenChoice | None = None
    ) -> torch.Tensor | None:
        """Launch steps on a device without waiting for any: the first reads `tokens` (rows, 1), the others what the
        step before them chose: the likeliest tokens, or those of a choice.

        The cache is advanced. Returns what they choose, (steps, rows); they may be fewer than asked for, and a row
        without a token gets -1. None if steps must be taken one by one.
        """
        ...


class Encoding(Model, Protocol):
    """A model with an encoder that can be compared with another's."""

    def encodes_like(self, other: Model) -> bool:
        """Whether both encoders make the same states of a source."""
        ...


class Compilable(Model, Protocol):
    """A model that says "compile" in `info.can`: its steps can run through torch.compile."""

    @property
    def fast_path(self) -> str | None:
        """The path of steps that is faster than a compiled one; None if there is none."""
        ...

    def compiled(self, config: CompileConfig) -> Model:
        """The same model with compiled steps; raises if they can't be compiled here."""
        ...
