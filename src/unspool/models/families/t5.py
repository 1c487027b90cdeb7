"""T5: the one encoder-decoder that is native so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.models.assembly import Progress
from unspool.models.encoder_decoder.t5 import T5
from unspool.models.encoder_decoder.t5_weights import T5Spec, assemble_t5
from unspool.models.families.base import refuse_quantised
from unspool.models.families.entry import FamilyEntry
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class T5Family(FamilyEntry):
    """Builds models of T5 checkpoints."""

    name: str = "t5"
    architectures: tuple[str, ...] = ("T5ForConditionalGeneration",)
    model_types: tuple[str, ...] = ("t5",)

    def build(
        self,
        config: Mapping[str, Any],
        tensors: WeightSource,
        *,
        is_gguf: bool,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> T5:
        """The model of a config and its weights."""
        if is_gguf:
            raise UnsupportedError("T5 is read from config.json and safetensors, not from a GGUF file")
        spec = read_t5_config(Settings(config), tensors)
        return T5(spec, assemble_t5(spec, tensors, device, dtype, progress), config, device, dtype)


def read_t5_config(config: Settings, source: WeightSource) -> T5Spec:
    """A T5, of the first kind or version 1.1 (whose head is its own and unscaled)."""
    refuse_quantised(config)
    hidden_size, num_layers = config.integer("d_model", "hidden_size"), config.integer("num_layers")
    words = config.text("feed_forward_proj", default="relu").split("-")
    if len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        raise UnsupportedError(f"{config.where} has feed_forward_proj={'-'.join(words)!r}; use 'NAME' or 'gated-NAME'")
    num_buckets = config.integer("relative_attention_num_buckets", default=32)
    max_distance = config.integer("relative_attention_max_distance", default=128)
    if num_buckets % 2 or max_distance <= num_buckets // 2:
        raise LoadError(
            f"{config.where} sorts distances up to {max_distance} into {num_buckets} buckets, half of which hold one "
            "distance each; an even number of buckets and distances beyond that half are needed"
        )
    activation = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    find_activation(activation)
    # Before transformers 5, tie_word_embeddings said both whether the head is tied and whether it is scaled.
    is_tied = config.boolean("tie_word_embeddings", default=True)
    is_scaled = config.boolean("scale_decoder_outputs", default=is_tied)
    has_own_head = "lm_head.weight" in source and (config.has("scale_decoder_outputs") or not is_tied)
    return T5Spec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        head_dim=config.integer("d_kv", default=64),
        num_heads=config.integer("num_heads", "num_attention_heads"),
        ffn_size=config.integer("d_ff"),
        num_encoder_layers=num_layers,
        num_decoder_layers=config.integer("num_decoder_layers", default=num_layers),
        num_buckets=num_buckets,
        max_distance=max_distance,
        eps=config.number("layer_norm_epsilon", default=1e-6),
        is_gated=len(words) == 2,
        activation=activation,
        is_head_tied=not has_own_head,
        head_scale=hidden_size**-0.5 if is_scaled else 1.0,
        eos_token_id=config.tokens("eos_token_id"),
        pad_token_id=config.token("pad_token_id"),
        decoder_start_token_id=config.token("decoder_start_token_id"),
    )


T5_FAMILY = T5Family()
