"""DoLa and guidance on native models with random weights: every cache agrees, and so does the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.conformance.cases import GOLDENS

import unspool
from unspool.models.native import NativeModel
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], [13]]
NEGATIVE = [[20, 21], [22, 23, 24, 25], [26, 27, 28]]


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Gemma2"])
def models(request: pytest.FixtureRequest) -> tuple[Any, NativeModel]:
    torch.manual_seed(3)
    extra = {"sliding_window": 6, "head_dim": 8} if request.param == "Gemma2" else {}
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **extra, eos_token_id=None, pad_token_id=0)
    kind = getattr(transformers, f"{request.param}ForCausalLM")
    reference = kind._from_config(config, attn_implementation="eager").eval()
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    described = config.to_dict() | {"architectures": [kind.__name__]}
    native = build_model(
        described, MemorySource(weights), is_gguf=False, device=torch.device("cpu"), dtype=torch.float32
    )
    return reference, native


def pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def inputs() -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")
    return dict(zip(names, (*pad(ROWS), *pad(NEGATIVE)), strict=True))


@torch.no_grad()
def guide_slowly(reference: Any, own: list[int], other: list[int], scale: float, num_new: int) -> list[int]:
    """Two whole passes of the reference for every token."""
    new: list[int] = []
    for _ in range(num_new):
        mine, theirs = (reference(torch.tensor([ids + new])).logits[0, -1].log_softmax(-1) for ids in (own, other))
        new.append(int((scale * (mine - theirs) + theirs).argmax()))
    return new


def test_guidance_equals_two_passes_of_the_reference(models) -> None:
    reference, native = models
    expected = [guide_slowly(reference, *pair, 1.6, 8) for pair in zip(ROWS, NEGATIVE, strict=True)]
    for way in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 2}):
        found = unspool.generate(native, **inputs(), guidance_scale=1.6, max_new_tokens=8, **way)
        assert found[:, 6:].tolist() == expected


def test_guidance_equals_the_references_own(models) -> None:
    reference, native = models
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for extra in ({}, {"negative_prompt_ids": torch.tensor([[20, 21], [22, 23]])}):
        theirs = reference.generate(
            ids, attention_mask=torch.ones_like(ids), guidance_scale=1.4, max_new_tokens=8, do_sample=False, **extra
        )
        assert torch.equal(unspool.generate(native, ids, guidance_scale=1.4, max_new_tokens=8, **extra), theirs)


@pytest.mark.parametrize(
    "way",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.4},
        {"num_beams": 3, "force_words_ids": [[30]]},
    ],
    ids=str,
)
def test_guided_beams_are_the_same_in_every_cache(models, way: dict[str, Any]) -> None:
    """The dynamic one branches: prompts and negative prompts are held once each."""
    _, native = models
    settings = {"guidance_scale": 1.6, "max_new_tokens": 7, "return_dict_in_generate": True, "output_scores": True}
    outputs = [
        unspool.generate(native, **inputs(), **settings, **way, **cache)
        for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"})
    ]
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        torch.testing.assert_close(output.sequences_scores, outputs[0].sequences_scores, atol=1e-3, rtol=1e-3)
        assert len(output.past_key_values.lengths) == 3 * way["num_beams"]


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_processor_does_what_the_setting_does(models, use_cache: bool) -> None:
    _, native = models
    negative = {"unconditional_ids": pad(NEGATIVE)[0], "unconditional_attention_mask": pad(NEGATIVE)[1]}
    processor = unspool.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.6, native, **negative, use_cache=use_cache)
    ids, mask = pad(ROWS)
    found = unspool.generate(native, ids, attention_mask=mask, logits_processor=[processor], max_new_tokens=6)
    assert torch.equal(found, unspool.generate(native, **inputs(), guidance_scale=1.6, max_new_tokens=6))


@torch.no_grad()
def test_guidance_of_an_encoder_decoder_equals_two_passes() -> None:
    """The reference can't: it gives the decoder's tokens to the encoder. By its model's own passes, it is this."""
    folder = GOLDENS / "models" / "t5"
    reference = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    native = unspool.load(folder, device="cpu").model
    expected = []
    for own, other in zip(ROWS, NEGATIVE, strict=True):
        ids = [reference.config.decoder_start_token_id]
        for _ in range(7):
            mine, theirs = (
                reference(torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                for source in (own, other)
            )
            ids.append(int((2.0 * (mine - theirs) + theirs).argmax()))
        expected.append(ids)
    settings = {"guidance_scale": 2.0, "max_new_tokens": 7, "eos_token_id": None}
    for way in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert unspool.generate(native, **inputs(), **settings, **way).tolist() == expected
    beams = [unspool.generate(native, **inputs(), **settings, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
def dola_slowly(reference: Any, prompt: list[int], layers: list[int], num_new: int) -> tuple[list[int], list[int]]:
    """DoLa from the hidden states of whole passes of the reference."""
    ids, chosen = list(prompt), []
    head = reference.get_output_embeddings()
    for _ in range(num_new):
        output = reference(torch.tensor([ids]), output_hidden_states=True)
        p = output.logits[0, -1].double().softmax(-1)
        q = [head(output.hidden_states[layer][0, -1]).double().softmax(-1) for layer in layers]
        far = [float(sum((m * (m / x).log()).sum() for x in (p, one))) for one in q for m in ((p + one) / 2,)]
        best = far.index(max(far))
        scores = (p / q[best]).log()
        scores[p < 0.1 * p.max()] = float("-inf")
        ids.append(int(scores.argmax()))
        chosen.append(layers[best])
    return ids[len(prompt) :], chosen


def test_dola_equals_the_references_hidden_states(models) -> None:
    reference, native = models
    layers = [0, 1, 3]
    for prompt in ROWS:
        tokens, chosen = dola_slowly(reference, prompt, layers, 8)
        for way in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            output = unspool.generate(
                native, [prompt], dola_layers=layers, max_new_tokens=8, return_dict_in_generate=True, **way
            )
            assert output.sequences[0, len(prompt) :].tolist() == tokens
            assert output.dola_layers == [chosen]
