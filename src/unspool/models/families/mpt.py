"""MPT: keys biased by position, layer norms without biases, an ungated feed-forward."""

from __future__ import annotations

from unspool.errors import UnsupportedError
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import AlibiSpec, DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.settings import Settings

NAMES = WeightNames(
    embedding="transformer.wte",
    layer="transformer.blocks.{i}.",
    attn_norm="norm_1",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    ffn_norm="norm_2",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
    final_norm="transformer.norm_f",
    prefix="transformer.",
)


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config, hidden=("d_model",), layers=("n_layers",), heads=("n_heads",))
    num_heads = sizes["num_heads"]
    attention = config.part("attn_config") or Settings({}, config.where)
    for name in ("clip_qkv", "qk_ln", "prefix_lm"):
        if attention.find(name):
            attention.refuse(name, attention.find(name), because="it is not built for MPT")
    attention.refuse("alibi", False, because="MPT models without position biases are not built")
    if num_heads & (num_heads - 1):
        raise UnsupportedError(f"{config.where} has {num_heads} heads; slopes are built for powers of two alone")
    return DecoderSpec(
        family="mpt",
        **sizes,
        ffn_size=4 * sizes["hidden_size"],
        max_context=config.integer("max_seq_len", default=2048),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5)),
        alibi=AlibiSpec(),
        attention_scale=attention.number("softmax_scale", default=sizes["head_dim"] ** -0.5),
        is_gated=False,
        activation="gelu",
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


MPT = DecoderFamily(
    name="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    model_types=("mpt",),
    read_config=_read_config,
    find_names=fixed(NAMES),
)
