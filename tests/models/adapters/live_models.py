"""Tiny objects of transformers that run natively, and what they answer beside transformers' own generate."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tests.models.adapters.tiny import LLAMA, PAIR, SIZES

import unspool

_WINDOWED = {**LLAMA, "sliding_window": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", SIZES),
    "gpt_neox": ("GPTNeoX", {**SIZES, "intermediate_size": 48}),
    "mistral": ("Mistral", _WINDOWED),
    "gemma2": ("Gemma2", {**_WINDOWED, "head_dim": 8, "query_pre_attn_scalar": 12}),
    "phi3": ("Phi3", LLAMA),
}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", PAIR),
    "t5": ("T5", {**SIZES, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}
IDS = [[5, 6, 7, 8, 9, 4, 11, 3, 17], [1, 9, 8, 7, 33, 21, 60, 44, 2]]


def make(family: str, device: str = "cpu", dtype: torch.dtype = torch.float32, *, is_narrow: bool = False) -> Any:
    """An object with random weights that the family's native model answers for; `is_narrow`: of 16 bits, in 32."""
    kind, sizes = (FAMILIES | PAIRS)[family]
    made = "ForConditionalGeneration" if family in PAIRS else "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, kind + made)._from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.15)
                if is_narrow:
                    parameter.copy_(parameter.bfloat16().to(parameter.dtype))
    return model.eval().to(device)


def check_alike(model: Any, *, native: bool | None = None, max_new_tokens: int = 6) -> None:
    """Raise unless an object's answer is that of its own generate; `native` says by which forward it must be."""
    ids = torch.tensor(IDS, device=model.device)
    call: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    try:
        expected = type(model).generate(model, ids, **call)
    except Exception:  # what was changed lets the object itself fail: then so does ours
        expected = None
    try:
        found = unspool.generate(model, ids, **call)
    except Exception:
        assert expected is None
        return
    reason = found.stats.path_reason
    if expected is None:
        assert "own forward" in reason, "the object's own generate failed, and the native form did not"
        return
    if native is not None:
        assert ("own forward" not in reason) is native, reason
    theirs, ours = torch.stack(expected.logits).float(), torch.stack(found.logits).float()
    rough = {torch.float32: 2e-3 if model.device.type == "cpu" else 5e-3}.get(model.dtype, 0.08) * float(
        theirs.nan_to_num().abs().amax().clamp(min=1e-3)
    )
    for row in range(ids.shape[0]):
        for step in range(max_new_tokens):
            torch.testing.assert_close(
                ours[step, row],
                theirs[step, row],
                atol=rough,
                rtol=0,
                equal_nan=True,
                msg=lambda text: f"{text}\n{reason}",
            )
            if found.sequences[row, step - max_new_tokens] != expected.sequences[row, step - max_new_tokens]:
                top = theirs[step, row].topk(2).values
                assert top[0] - top[1] <= 2 * rough, f"another token: {reason}"
                break  # a tie, behind which texts differ
