"""BART and its kin: mBART, Pegasus, Marian, M2M100 (and NLLB), Blenderbot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from unspool.errors import LoadError
from unspool.kernels.activations import find_activation
from unspool.models.decoder.spec import NormSpec
from unspool.models.encoder_decoder.layers import AttentionNames, PairNames, StackNames
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec, PositionSpec, StackSpec
from unspool.models.families.pair import PairFamily, read_pair_ids
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

EPS: Final = 1e-5  # of every norm


@dataclass(frozen=True, slots=True)
class _Kin:
    """What the code of a family fixes, and its defaults for what a config leaves out."""

    name: str
    is_norm_first: bool
    has_embedding_norm: bool
    positions: Literal["learned", "sinusoidal", "growing"]
    offset: int = 0
    activation: str = "gelu"
    scales_embedding: bool = False
    ids: tuple[tuple[str, int | None], ...] = ()


def has_tensor(source: WeightSource, name: str) -> bool:
    """Whether a checkpoint has a tensor, with or without the prefix that some leave out."""
    return name in source or name.removeprefix("model.") in source


def _read_config(kin: _Kin, config: Settings, source: WeightSource) -> EncoderDecoderSpec:
    hidden_size = config.integer("d_model", "hidden_size")
    activation = config.text("activation_function", default=kin.activation)
    find_activation(activation)
    vocab_size = config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", default=True)
    is_shared = is_tied or not all(
        has_tensor(source, f"model.{side}.embed_tokens.weight") for side in ("encoder", "decoder")
    )
    target_size = vocab_size
    if kin.name == "marian" and not config.boolean("share_encoder_decoder_embeddings", default=True):
        is_shared, target_size = False, config.integer("decoder_vocab_size", default=vocab_size)
    ids = read_pair_ids(config, **dict(kin.ids))
    positions = _read_positions(kin, config, ids)
    return EncoderDecoderSpec(
        family=kin.name,
        hidden_size=hidden_size,
        encoder=read_stack(config, "encoder", vocab_size, hidden_size, positions),
        decoder=read_stack(config, "decoder", target_size, hidden_size, positions),
        norm=NormSpec("layer", EPS, has_bias=True),
        is_norm_first=kin.is_norm_first,
        has_embedding_norm=kin.has_embedding_norm,
        has_final_norm=kin.is_norm_first,
        has_bias=True,
        has_key_bias=True,
        activation=activation,
        embedding_scale=hidden_size**0.5 if config.boolean("scale_embedding", default=kin.scales_embedding) else 1.0,
        is_embedding_shared=is_shared,
        is_head_tied=is_tied or not has_tensor(source, "lm_head.weight"),
        has_head_bias="final_logits_bias" in source,
        **ids,
    )


def _read_positions(kin: _Kin, config: Settings, ids: dict[str, Any]) -> PositionSpec:
    if kin.positions == "growing":  # position 0 stands behind the pad token's
        pad = ids["pad_token_id"] or 0
        return PositionSpec("sinusoidal", None, pad + 1, is_shifted=True, uncounted_id=pad)
    num_positions = config.integer("max_position_embeddings", default=1_024)
    return PositionSpec(kin.positions, num_positions, kin.offset)


def read_stack(
    config: Settings, side: str, vocab_size: int, hidden_size: int, positions: PositionSpec | None
) -> StackSpec:
    """One side's sizes, under the names that BART gave them."""
    num_heads = config.integer(f"{side}_attention_heads", "num_attention_heads")
    if hidden_size % num_heads:
        raise LoadError(f"{config.where} divides a hidden size of {hidden_size} among {num_heads} heads")
    return StackSpec(
        vocab_size,
        config.integer(f"{side}_layers", "num_hidden_layers"),
        num_heads,
        hidden_size // num_heads,
        config.integer(f"{side}_ffn_dim"),
        positions,
        attention_scale=(hidden_size // num_heads) ** -0.5,
    )


def name_stack(side: str, *, has_embedding_norm: bool = False) -> StackNames:
    """A checkpoint's names of one side, as BART gave them."""
    start = f"model.{side}"

    def name_attention(kind: str) -> AttentionNames:
        parts = (f"{kind}.{part}_proj" for part in ("q", "k", "v", "out"))
        return AttentionNames(f"{kind}_layer_norm", *parts)

    return StackNames(
        layer=f"{start}.layers.{{i}}.",
        own=name_attention("self_attn"),
        up=("fc1",),
        down="fc2",
        ffn_norm="final_layer_norm",
        cross=name_attention("encoder_attn") if side == "decoder" else None,
        embedding=f"{start}.embed_tokens",
        positions=f"{start}.embed_positions",
        embedding_norm=f"{start}.layernorm_embedding" if has_embedding_norm else "",
        final_norm=f"{start}.layer_norm",
        convolutions=(f"{start}.conv1", f"{start}.conv2"),
    )


def _find_names(spec: EncoderDecoderSpec, _: WeightSource) -> PairNames:
    return PairNames(
        name_stack("encoder", has_embedding_norm=spec.has_embedding_norm),
        name_stack("decoder", has_embedding_norm=spec.has_embedding_norm),
        shared="model.shared",
        head_bias="final_logits_bias",
        prefix="model.",
        # Tables and marks of older files, which are computed here or mean nothing.
        spare=tuple(
            f"{start}{side}.{name}"
            for start in ("model.", "")
            for side in ("encoder", "decoder")
            for name in ("version", "embed_positions.weights", "embed_positions._float_tensor")
        ),
    )


def _make_family(kin: _Kin, architecture: str) -> PairFamily:
    return PairFamily(
        name=kin.name,
        architectures=(architecture,),
        model_types=(kin.name,),
        read_config=partial(_read_config, kin),
        find_names=_find_names,
    )


_IDS: Final = (("bos_token_id", 0), ("eos_token_id", 2), ("pad_token_id", 1))

BART: Final = _make_family(
    _Kin("bart", False, True, "learned", offset=2, ids=(*_IDS, ("decoder_start_token_id", 2))),
    "BartForConditionalGeneration",
)
MBART: Final = _make_family(_Kin("mbart", True, True, "learned", offset=2, ids=_IDS), "MBartForConditionalGeneration")
PEGASUS: Final = _make_family(
    _Kin(
        "pegasus",
        True,
        False,
        "sinusoidal",
        ids=(("eos_token_id", 1), ("pad_token_id", 0), ("decoder_start_token_id", 0)),
    ),
    "PegasusForConditionalGeneration",
)
MARIAN: Final = _make_family(
    _Kin(
        "marian",
        False,
        False,
        "sinusoidal",
        ids=(("eos_token_id", 0), ("pad_token_id", 58_100), ("decoder_start_token_id", 58_100)),
    ),
    "MarianMTModel",
)
M2M100: Final = _make_family(
    _Kin(
        "m2m_100",
        True,
        False,
        "growing",
        activation="relu",
        scales_embedding=True,
        ids=(*_IDS, ("decoder_start_token_id", 2)),
    ),
    "M2M100ForConditionalGeneration",
)
BLENDERBOT: Final = _make_family(
    _Kin(
        "blenderbot",
        True,
        False,
        "learned",
        ids=(("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 0), ("decoder_start_token_id", 1)),
    ),
    "BlenderbotForConditionalGeneration",
)
