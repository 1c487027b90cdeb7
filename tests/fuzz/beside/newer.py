"""Families that transformers has had since 5.0, most of them without a native form here: settings of tiny models."""

from __future__ import annotations

from typing import Any

from tests.models.adapters.tiny import DEEPSEEK, LLAMA, SIZES, TYPES

_HEADS = {**LLAMA, "head_dim": 8}
_WINDOW = {"sliding_window": 5, "layer_types": TYPES}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_EXPERTS = {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_INDEX = {**DEEPSEEK, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": _MIXED,
}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_STREAMS = {"hc_count": 2, "hc_lowrank": 8}
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}

NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**_EXPERTS, **_WINDOW, "num_dense_layers": 1}),
    "axk1": ("AXK1", DEEPSEEK),
    "beam": (
        "Beam",
        {**_EXPERTS, **_WINDOW, "mlp_layer_types": ["dense", "sparse", "sparse"]} | {"n_group": 1, "topk_group": 1},
    ),
    "cohere2_moe": ("Cohere2Moe", {**LLAMA, "sliding_window": 5, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere_compass": (
        "CohereCompass",
        {**LLAMA, **_WINDOW, "rope_parameters": {"full_attention": _ROTATION, "sliding_attention": _ROTATION}},
    ),
    "cwm": ("Cwm", {**_HEADS, **_WINDOW}),
    "dots1": ("Dots1", {**_ROUTED, "n_shared_experts": 1}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "exaone_moe": ("ExaoneMoe", {**_EXPERTS, **_WINDOW}),
    "flex_olmo": ("FlexOlmo", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "flint": ("Flint", {**_SHARED, **_WINDOW, "mlp_only_layers": [0]}),
    "gemma3n": (
        "Gemma3n",
        {**_HEADS, **_WINDOW, "altup_num_inputs": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 97, "num_kv_shared_layers": 1, "intermediate_size": [48] * 3}
        | {"activation_sparsity_pattern": [0.0] * 3},
    ),
    "gemma4": (
        "Gemma4",
        {**_HEADS, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
        | {"num_kv_shared_layers": 0},
    ),
    "glm4_moe": ("Glm4Moe", _ROUTED),
    "glm4_moe_lite": ("Glm4MoeLite", DEEPSEEK),
    "granite_swa": ("GraniteSWA", {**LLAMA, **_WINDOW}),
    "granitemoe_swa": ("GraniteMoeSWA", {**LLAMA, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {**_HEADS, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": ("HYV3", _EXPERTS),
    "hyperclovax": ("HyperCLOVAX", _HEADS),
    "jais2": ("Jais2", _HEADS),
    "kolibri1": ("Kolibri1", {**_SHARED, **_WINDOW}),
    "laguna": ("Laguna", _SHARED),
    "llama4": (
        "Llama4",
        {**_HEADS, "num_local_experts": 4, "attention_chunk_size": 5, "intermediate_size_mlp": 48}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**DEEPSEEK, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2}
        | {"num_layers": 2, "head_dim": 4, "qk_head_dim": 12},
    ),
    "mellum": ("Mellum", {**_EXPERTS, **_WINDOW}),
    "mimo_v2_flash": ("MiMoV2Flash", {**_EXPERTS, "n_routed_experts": 4}),
    "minicpm3": ("MiniCPM3", DEEPSEEK),
    "minimax_m2": ("MiniMaxM2", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "ministral3": ("Ministral3", _HEADS),
    "modernbert_decoder": ("ModernBertDecoder", {**SIZES, "intermediate_size": 48, "local_attention": 8}),
    "nanochat": ("NanoChat", LLAMA),
    "phimoe": ("Phimoe", {**LLAMA, "num_local_experts": 4}),
    "solar_open": ("SolarOpen", {**_EXPERTS, "n_routed_experts": 4}),
    "youtu": ("Youtu", DEEPSEEK),
}
# Their caches hold more than keys and values: states, or what an indexer finds keys by.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "axk2": ("AXK2", _INDEX),
    "bailing_hybrid": (
        "BailingHybrid",
        {**DEEPSEEK, "num_local_experts": 4, "head_dim": 8, "layer_types": _MIXED, "num_mtp_layers": 0},
    ),
    "bamba": ("Bamba", {**LLAMA, **_SSD, "attn_layer_indices": [1]}),
    "deepseek_v32": ("DeepseekV32", _INDEX),
    "falcon_h1": ("FalconH1", {**_HEADS, **_SSD, "mamba_d_ssm": 64}),
    "glm_moe_dsa": ("GlmMoeDsa", _INDEX),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**LLAMA, **_SSD, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
        | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "hy_v4": ("HYV4", {**_INDEX, "n_group": 1, "hc_mult": 2, "indexer_types": ["full", "shared", "full"]}),
    "jamba": (
        "Jamba",
        {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "kimi_linear": (
        "KimiLinear",
        {**DEEPSEEK, "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": _MIXED}
        | {"n_group": 1},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**LLAMA, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "nemotron_h": (
        "NemotronH",
        {**_ROUTED, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8}
        | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "n_shared_experts": 1}
        | {"moe_shared_expert_intermediate_size": 16},
    ),
    "olmo_hybrid": ("OlmoHybrid", {**LLAMA, "layer_types": _MIXED}),
    "qwen3_5": ("Qwen3_5", {**_HEADS, **_DELTA}),
    "qwen3_next": ("Qwen3Next", {**_SHARED, **_DELTA}),
    "qwen4_exp": (
        "Qwen4Exp",
        {**_SHARED, **_DELTA, **_STREAMS, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
        | {"indexer_compress_ratio": 2},
    ),
    "zamba2": (
        "Zamba2",
        {**SIZES, "intermediate_size": 48, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8}
        | {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_headdim": 8, "chunk_size": 4, "mamba_expand": 2}
        | {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "num_mem_blocks": 1},
    ),
}
TEXTS = ("CohereCompass", "Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen4Exp")  # …TextConfig
