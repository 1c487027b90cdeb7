"""The minimum and maximum of every number that is read from a config or a GGUF header.

The bounds are far beyond existing models. They keep every size small enough to be multiplied, looped over and compared
with the tensors of the file, which is the decisive check.
"""

from __future__ import annotations

from typing import Final

MOST_LAYERS: Final = 4_096
MOST_HEADS: Final = 16_384
MOST_WIDTH: Final = 1 << 20  # of hidden states and heads
MOST_INNER: Final = 1 << 22  # of the states between two projections
MOST_TOKENS: Final = 1 << 24
MOST_POSITIONS: Final = 1 << 30  # also of windows; they allocate nothing by themselves

MOST_EXPERTS: Final = 1 << 16

_LAYERS = (1, MOST_LAYERS)
_HEADS = (1, MOST_HEADS)
_WIDTH = (1, MOST_WIDTH)
_INNER = (1, MOST_INNER)
_POSITIONS = (1, MOST_POSITIONS)

INTEGERS: Final[dict[str, tuple[int, int]]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "block_count"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), _POSITIONS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "attention.head_count"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "attention.head_count_kv"), _HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "embedding_length", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("head_dim", "d_kv", "attention.key_length", "attention.value_length", "rotary_dim"), _WIDTH),
    **dict.fromkeys(("rope.dimension_count", "time_step_rank", "ssm.time_step_rank"), _WIDTH),
    **dict.fromkeys(("state_size", "ssm.state_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), _INNER),
    **dict.fromkeys(("feed_forward_length", "ssm.inner_size"), _INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), _POSITIONS),
    **dict.fromkeys(("original_max_position_embeddings", "rope.scaling.original_context_length"), _POSITIONS),
    **dict.fromkeys(("sliding_window", "attention.sliding_window", "relative_attention_max_distance"), _POSITIONS),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), (1, MOST_TOKENS)),
    **dict.fromkeys(("n_layers", "no_rope_layer_interval"), _LAYERS),
    **dict.fromkeys(("n_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("max_seq_len", "window_size"), _POSITIONS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), (1, MOST_EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group"), (1, MOST_EXPERTS)),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0, MOST_EXPERTS)),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), (0, MOST_EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _INNER),
    **dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), _INNER),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval"), _LAYERS),
    "moe_layer_start_index": (0, MOST_LAYERS),
    "moe_layer_end_index": (-1, MOST_LAYERS),
    "first_k_dense_replace": (0, MOST_LAYERS),
    "num_mel_bins": (1, 1 << 16),
    "relative_attention_num_buckets": (4, 1 << 16),
    "sliding_window_pattern": _LAYERS,
    "max_window_layers": (0, MOST_LAYERS),
    "num_ln_in_parallel_attn": (1, 2),
    "conv_kernel": (2, 1_024),
    "ssm.conv_kernel": (2, 1_024),
    "expand": (1, 64),
}

_EPSILON = (1e-30, 1.0)
_THETA = (2.0, 1e15)  # the base of rope's frequencies
_FACTOR = (1e-6, 1e6)

NUMBERS: Final[dict[str, tuple[float, float]]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    "mixer_rms_eps": _EPSILON,
    **dict.fromkeys(("routed_scaling_factor", "swiglu_limit", "swiglu_alpha"), _FACTOR),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _FACTOR),
    **dict.fromkeys(("logits_scaling", "logit_scale", "softmax_scale"), _FACTOR),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _THETA),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), _THETA),
    **dict.fromkeys(("factor", "rope.scaling.factor", "rope.scale_linear"), _FACTOR),
    **dict.fromkeys(("attention_factor", "rope.scaling.attn_factor", "mscale", "mscale_all_dim"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), _FACTOR),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), _FACTOR),
}
