"""T5, its version 1.1, mT5 and UMT5: distances instead of positions, norms without a mean."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.models.decoder.spec import NormSpec
from unspool.models.encoder_decoder.layers import AttentionNames, PairNames, StackNames
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec, RelativeSpec, StackSpec
from unspool.models.families.pair import PairFamily, read_pair_ids
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

# Some files carry a bias that the first implementation made for cross-attention and never read.
_SPARE: Final = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def _read_config(family: str, config: Settings, source: WeightSource) -> EncoderDecoderSpec:
    """A T5, of the first kind or version 1.1 (whose head is its own and unscaled)."""
    hidden_size, num_layers = config.integer("d_model", "hidden_size"), config.integer("num_layers")
    activation, is_gated = _read_activation(config, "relu" if family == "t5" else "gated-gelu")
    is_head_tied, is_scaled = _read_head(config, source, family)
    sizes = (config.integer("num_heads", "num_attention_heads"), config.integer("d_kv", default=64))
    vocab_size, ffn_size = config.integer("vocab_size"), config.integer("d_ff")
    return EncoderDecoderSpec(
        family=family,
        hidden_size=hidden_size,
        encoder=StackSpec(vocab_size, num_layers, *sizes, ffn_size),
        decoder=StackSpec(vocab_size, config.integer("num_decoder_layers", default=num_layers), *sizes, ffn_size),
        norm=NormSpec("rms", config.number("layer_norm_epsilon", default=1e-6)),
        relative=_read_distances(config, family),
        is_gated=is_gated,
        activation=activation,
        is_head_tied=is_head_tied,
        head_scale=hidden_size**-0.5 if is_scaled else 1.0,
        **read_pair_ids(config, eos_token_id=1, pad_token_id=0, decoder_start_token_id=None if family == "t5" else 0),
    )


def _read_activation(config: Settings, default: str) -> tuple[str, bool]:
    words = config.text("feed_forward_proj", default=default).split("-")
    if len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        raise UnsupportedError(f"{config.where} has feed_forward_proj={'-'.join(words)!r}; use 'NAME' or 'gated-NAME'")
    activation = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    find_activation(activation)
    return activation, len(words) == 2


def _read_distances(config: Settings, family: str) -> RelativeSpec:
    num_buckets = config.integer("relative_attention_num_buckets", default=32)
    max_distance = config.integer("relative_attention_max_distance", default=128)
    if num_buckets % 2 or max_distance <= num_buckets // 2:
        raise LoadError(
            f"{config.where} sorts distances up to {max_distance} into {num_buckets} buckets, half of which hold one "
            "distance each; an even number of buckets and distances beyond that half are needed"
        )
    return RelativeSpec(num_buckets, max_distance, is_per_layer=family == "umt5")


def _read_head(config: Settings, source: WeightSource, family: str) -> tuple[bool, bool]:
    """Whether the head is tied, and whether its states are scaled."""
    has_own = "lm_head.weight" in source
    if family == "mt5":  # files have tie_word_embeddings=true beside a head of their own
        return not has_own, False
    # Before transformers 5, tie_word_embeddings said both whether the head is tied and whether it is scaled.
    is_tied = config.boolean("tie_word_embeddings", default=True)
    is_scaled = config.boolean("scale_decoder_outputs", default=is_tied)
    return not (has_own and (config.has("scale_decoder_outputs") or not is_tied)), is_scaled


def _name_stack(side: str) -> StackNames:
    is_decoder = side == "decoder"
    feed = "layer.2" if is_decoder else "layer.1"

    def name_attention(start: str, kind: str) -> AttentionNames:
        return AttentionNames(f"{start}.layer_norm", *(f"{start}.{kind}.{part}" for part in "qkvo"))

    return StackNames(
        layer=f"{side}.block.{{i}}.",
        own=name_attention("layer.0", "SelfAttention"),
        up=(f"{feed}.DenseReluDense.wi_0", f"{feed}.DenseReluDense.wi_1"),
        down=f"{feed}.DenseReluDense.wo",
        ffn_norm=f"{feed}.layer_norm",
        cross=name_attention("layer.1", "EncDecAttention") if is_decoder else None,
        embedding=f"{side}.embed_tokens",
        final_norm=f"{side}.final_layer_norm",
        biases=f"{side}.block.{{i}}.layer.0.SelfAttention.relative_attention_bias",
    )


def _find_names(spec: EncoderDecoderSpec, _: WeightSource) -> PairNames:
    def name_stack(side: str) -> StackNames:
        names = _name_stack(side)
        return names if spec.is_gated else replace(names, up=(names.up[0].removesuffix("_0"),))

    return PairNames(name_stack("encoder"), name_stack("decoder"), shared="shared", spare=_SPARE)


def _make_family(name: str, architecture: str) -> PairFamily:
    return PairFamily(
        name=name,
        architectures=(architecture,),
        model_types=(name,),
        read_config=partial(_read_config, name),
        find_names=_find_names,
    )


T5: Final = _make_family("t5", "T5ForConditionalGeneration")
MT5: Final = _make_family("mt5", "MT5ForConditionalGeneration")
UMT5: Final = _make_family("umt5", "UMT5ForConditionalGeneration")
