"""Baichuan 1 and 2: a Llama with one matrix for q, k and v; the 13B form has ALiBi in place of rope."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.spec import AlibiSpec, DecoderSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.families.llama import NAMES as LLAMA_NAMES
from unspool.models.families.llama import read_llama_config
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

_VOCAB_2 = 125_696  # the second generation's vocabulary; it alone normalises its head
_LAYERS_13B = 40


def _read_config(config: Settings) -> DecoderSpec:
    spec = replace(read_llama_config(config, "baichuan"), is_head_normalised=config.find("vocab_size") == _VOCAB_2)
    # The config does not name the form; only the one with rope has a max_position_embeddings.
    return spec if config.has("max_position_embeddings") else _with_alibi(spec)


def _with_alibi(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, rope=None, alibi=AlibiSpec(), max_context=None)


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="baichuan", is_interleaved=True)
    return _with_alibi(spec) if spec.num_layers == _LAYERS_13B else spec


BAICHUAN = DecoderFamily(
    name="baichuan",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_types=("baichuan",),
    read_config=_read_config,
    find_names=fixed(replace(LLAMA_NAMES, qkv=("self_attn.W_pack",))),
    gguf=("baichuan",),
    read_gguf=_read_gguf,
)
