"""The description of a decoder's block, which every family fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from unspool.protocols import LayerKind, ModelInfo

_CAN = frozenset(
    {
        "hidden_states",
        "attentions",
        "inputs_embeds",
        "last_states",
        "branches",
        "forks",
        "early_logits",
        "early_exit",
        "compile",
        "stretches",
        "seats",
    }
)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How hidden states are normalised."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0  # added to stored weights: 1 for Gemma's
    has_bias: bool = False
    has_weight: bool = True
    is_float32: bool = False  # weights stay in float32 for every model dtype


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of queries and keys; every scaling scheme ends up in the frequencies and the gain."""

    frequencies: tuple[float, ...]  # radians per position, one per pair
    is_interleaved: bool  # the stored weights pair neighbours (else the two halves of a head)
    gain: float = 1.0
    # Which of a token's three positions each pair is rotated by; empty: a token has one. Tokens of texts have three
    # equal ones, so only prompts with pictures look at it.
    axes: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers of a head are rotated."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """How keys are biased by their position."""

    scale: float = 1.0
    is_rounded: bool = False  # computed in bfloat16, as Falcon was trained


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A feed-forward of experts, a few of which a router chooses for every token.

    Experts are chosen by the highest scores; their outputs are weighted by these scores and added up.
    """

    num_experts: int
    num_chosen: int  # per token
    ffn_size: int  # of one expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    is_normalised: bool = True  # the weights of the chosen experts are divided by their sum
    weight_scale: float = 1.0
    has_router_bias: bool = False
    has_choice_bias: bool = False  # added to scores to choose by, not to weights
    shared_size: int = 0  # of an expert that every token runs through; 0: there is none
    is_shared_gated: bool = False
    dense_layers: frozenset[int] = frozenset()  # layers with a plain feed-forward
    gate_limit: float | None = None  # gpt-oss's gate, instead of the activation: both sides stay within this limit
    gate_gain: float = 1.702


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One configurable decoder: sizes, norms, positions, attention, feed-forward, embeddings and head."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_context: int | None

    norm: NormSpec
    norm_placement: Literal["pre", "post", "sandwich", "after"] = "pre"  # "after": of what a residual adds, alone
    residual: Literal["sequential", "parallel"] = "sequential"
    has_ffn_norm: bool = True  # without it a parallel feed-forward reads what attention reads
    has_final_norm: bool = True

    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None  # for "sliding" layers, if it differs
    unturned: frozenset[int] = frozenset()  # layers whose queries and keys are not rotated
    alibi: AlibiSpec | None = None
    num_positions: int | None = None  # rows of a learned table of positions
    position_offset: int = 0  # index of position 0 in that table

    attention_scale: float = 1.0
    is_scaled_by_layer: bool = False  # the scale is divided by the layer's number, from 1
    attention_softcap: float | None = None
    layer_kinds: tuple[LayerKind, ...] = ()  # empty: all "full"
    window: int | None = None
    qk_norm: NormSpec | None = None
    qk_norm_span: Literal["head", "each", "whole"] = "head"  # weights for all heads, one set per head, or over all
    has_sinks: bool = False  # a head's attention has a key without a value, whose score is learned
    has_qkv_bias: bool = False
    has_out_bias: bool = False

    is_gated: bool = True
    activation: str = "silu"
    has_ffn_bias: bool = False
    mixture: MixtureSpec | None = None  # of the layers that are not among its dense ones

    embedding_size: int | None = None  # if embeddings are narrower than hidden states (OPT-350m)
    embedding_scale: float = 1.0
    state_scale: float = 1.0  # states are kept divided by it: Granite scales what a residual adds
    has_embedding_norm: bool = False

    is_head_tied: bool = False
    has_head_bias: bool = False
    is_head_normalised: bool = False  # its rows have length 1 (Baichuan 2)
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # part of the final norm

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def kind_of(self, layer: int) -> LayerKind:
        """The layer's kind of attention."""
        return self.layer_kinds[layer] if self.layer_kinds else "full"

    def mixture_of(self, layer: int) -> MixtureSpec | None:
        """The layer's mixture of experts, if it has one."""
        return self.mixture if self.mixture is not None and layer not in self.mixture.dense_layers else None

    @property
    def norms_heads_apart(self) -> bool:
        """Whether queries and keys have norms that kernels don't know: other than one of root mean squares per head."""
        return self.qk_norm is not None and (self.qk_norm_span != "head" or self.qk_norm.kind != "rms")

    def scale_of(self, layer: int) -> float:
        """The factor of a layer's scores."""
        return self.attention_scale / (layer + 1) if self.is_scaled_by_layer else self.attention_scale

    def describe(self) -> ModelInfo:
        """The model's `ModelInfo`."""
        return ModelInfo(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            embedding_size=self.embedding_size,
            max_context=self.max_context,
            ends_at_context=self.num_positions is not None,
            window=self.window,
            layer_kinds=tuple(self.kind_of(i) for i in range(self.num_layers)),
            has_tied_embeddings=self.is_head_tied,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            can=_CAN | ({"shifted_keys"} if self.num_positions is None else set()),
        )

    def name_values(self) -> dict[str, Any]:
        """The values under the names that most configs use."""
        eos = self.eos_token_id
        return {
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "sliding_window": self.window,
            "tie_word_embeddings": self.is_head_tied,
            "is_encoder_decoder": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
        }
