"""Masks of bits on scores, and structured texts, on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.cases import GOLDENS
from tests.fakes import make_tokenizer

import unspool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("vocab", [31, 160, 49_152, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_leaves_the_scores_that_operators_leave(vocab: int, dtype: torch.dtype) -> None:
    from unspool.kernels.masks import keep_allowed, keep_allowed_plainly

    made = torch.Generator().manual_seed(vocab)
    scores = torch.randn(5, vocab, generator=made).to("cuda", dtype)
    bits = torch.randint(-(2**31), 2**31, (5, (vocab + 31) // 32), generator=made).to(torch.int32)
    bits = bits.cuda()
    assert torch.equal(keep_allowed(scores, bits), keep_allowed_plainly(scores, bits))


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3}, {"drafter": "grammar"}])
def test_a_structured_text_is_the_cpus(way: dict[str, object]) -> None:
    pytest.importorskip("llguidance")
    texts = []
    for device in ("cpu", "cuda"):
        lm = unspool.load(GOLDENS / "models" / "llama", native=True, device=device, dtype="float32")
        lm.tokenizer = make_tokenizer()
        texts.append(
            lm.generate([[5, 17, 90]], regex="(ab|no){2,6}[a-z]!", eos_token_id=2, max_new_tokens=40, **way).texts
        )
    assert texts[0] == texts[1]
