"""The description of an encoder-decoder, which every family fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from unspool.errors import InputError
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.protocols import FeatureShape, ModelInfo

_CAN = frozenset({"branches", "forks", "stretches"})


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Embeddings of positions, added to those of tokens."""

    kind: Literal["learned", "sinusoidal"]
    num_positions: int | None  # None: a sinusoidal table grows with the text
    offset: int = 0  # index of position 0 in the table
    is_shifted: bool = False  # frequencies as in tensor2tensor: the last one is exactly 1 / 10000
    uncounted_id: int | None = None  # a token that has no position, nor counts in those of the tokens behind it


@dataclass(frozen=True, slots=True)
class RelativeSpec:
    """Biases of attention scores by distance, in buckets (T5)."""

    num_buckets: int
    max_distance: int
    is_per_layer: bool = False  # every layer has its own biases (UMT5); else the first layer's serve all


@dataclass(frozen=True, slots=True)
class StackSpec:
    """One side: the encoder or the decoder."""

    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    positions: PositionSpec | None = None
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class EncoderDecoderSpec:
    """One configurable encoder-decoder: sizes, norms, positions, attention, feed-forward, embeddings and head."""

    family: str
    hidden_size: int
    encoder: StackSpec
    decoder: StackSpec

    norm: NormSpec
    is_norm_first: bool = True  # else after the residual sum
    has_embedding_norm: bool = False
    has_final_norm: bool = True

    relative: RelativeSpec | None = None
    has_bias: bool = False  # of all projections
    has_key_bias: bool = False

    is_gated: bool = False
    activation: str = "gelu"

    embedding_scale: float = 1.0
    is_embedding_shared: bool = True  # both sides read one table
    is_head_tied: bool = True  # to the decoder's table
    head_scale: float = 1.0  # of the states that the head reads
    has_head_bias: bool = False

    features: FeatureShape | None = None  # the encoder reads these through two convolutions (Whisper)

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None

    @property
    def longest_source(self) -> int | None:
        """The number of positions that a source may have."""
        return self.encoder.positions.num_positions if self.encoder.positions is not None else None

    @property
    def max_context(self) -> int | None:
        """The number of positions that a text may have."""
        return self.decoder.positions.num_positions if self.decoder.positions is not None else None

    def check_length(self, longest: int) -> None:
        """Raise if a text would get more positions than the model has."""
        limit = self.max_context
        if limit is not None and longest > limit:
            raise InputError(f"position {longest - 1} was asked for and {self.family} has {limit} of them")

    def describe(self) -> ModelInfo:
        """The model's `ModelInfo`."""
        return ModelInfo(
            family=self.family,
            vocab_size=self.decoder.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.decoder.num_layers,
            num_heads=self.decoder.num_heads,
            max_context=self.max_context,
            layer_kinds=tuple(["full"] * self.decoder.num_layers),
            is_encoder_decoder=True,
            has_tied_embeddings=self.is_head_tied,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            decoder_start_token_id=self.decoder_start_token_id,
            source_vocab_size=self.encoder.vocab_size,
            longest_source=self.longest_source,
            features=self.features,
            uncounted_id=None if self.decoder.positions is None else self.decoder.positions.uncounted_id,
            can=(ModelInfo.can | _CAN) - (set() if self.features is None else {"inputs_embeds"}),
        )

    def describe_encoder(self) -> tuple[Any, ...]:
        """Everything that an encoder's states follow from, beside its weights."""
        return (
            self.hidden_size,
            self.encoder,
            self.norm,
            self.is_norm_first,
            self.has_embedding_norm,
            self.has_final_norm,
            self.relative,
            self.is_gated,
            self.activation,
            self.embedding_scale,
            self.features,
        )

    def describe_decoder(self) -> DecoderSpec:
        """The decoder's side as a decoder of its own, whose blocks lack cross-attention."""
        decoder, positions = self.decoder, self.decoder.positions
        return DecoderSpec(
            family=self.family,
            vocab_size=decoder.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_heads,
            head_dim=decoder.head_dim,
            ffn_size=decoder.ffn_size,
            max_context=self.max_context,
            norm=self.norm,
            norm_placement="pre" if self.is_norm_first else "post",
            has_final_norm=self.has_final_norm,
            num_positions=None if positions is None else positions.num_positions,
            position_offset=0 if positions is None else positions.offset,
            attention_scale=decoder.attention_scale,
            has_qkv_bias=self.has_bias,
            has_out_bias=self.has_bias,
            is_gated=self.is_gated,
            activation=self.activation,
            has_ffn_bias=self.has_bias,
            embedding_scale=self.embedding_scale,
            has_embedding_norm=self.has_embedding_norm,
            is_head_tied=self.is_head_tied,
            has_head_bias=self.has_head_bias,
        )

    def name_values(self) -> dict[str, Any]:
        """The values under the names that most configs use."""
        eos = self.eos_token_id
        return {
            "model_type": self.family,
            "vocab_size": self.decoder.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.decoder.ffn_size,
            "num_hidden_layers": self.encoder.num_layers,
            "num_decoder_layers": self.decoder.num_layers,
            "num_attention_heads": self.decoder.num_heads,
            "num_key_value_heads": self.decoder.num_heads,
            "head_dim": self.decoder.head_dim,
            "max_position_embeddings": self.max_context,
            "is_encoder_decoder": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
            "decoder_start_token_id": self.decoder_start_token_id,
        }
