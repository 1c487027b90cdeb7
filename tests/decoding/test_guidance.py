"""Guidance, against a slow loop of its definition: two texts, no cache, no batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from tests.conformance.cases import load_model
from tests.decoding.test_sampling import critical
from tests.engine.fakes import make_lm
from tests.fakes import FakeEncoderDecoder, FakeModel, pad_left
from unspool import generate, stream
from unspool.api.starting import start
from unspool.cache import Cache, DynamicCache, StaticCache
from unspool.errors import SettingError
from unspool.protocols import LAST, Forward, Want

ROWS = [[3, 4, 5, 6], [7], [8, 9], [11, 4, 2, 6, 5]]
NEGATIVE = [[1, 2], [3, 4, 5, 6, 7, 8, 9], [9], [4, 4, 4]]


def guide(model: FakeModel, own: Sequence[int], other: Sequence[int], scale: float) -> torch.Tensor:
    """Guided log-probabilities (vocab,) of the next token."""
    mine, theirs = (model.score(ids).log_softmax(-1) for ids in (own, other))
    return scale * (mine - theirs) + theirs


def decode_slowly(
    model: FakeModel,
    prompt: list[int],
    negative: list[int] | None,
    scale: float,
    num_new: int,
    eos: int | None = None,
    choose: Callable[[torch.Tensor], int] = lambda scores: int(scores.argmax()),
) -> list[int]:
    """New tokens of one row."""
    own, other = list(prompt), list(prompt[-1:] if negative is None else negative)
    for _ in range(num_new):
        token = choose(guide(model, own, other, scale))
        own.append(token)
        other.append(token)
        if token == eos:
            break
    return own[len(prompt) :]


def pad_negative(rows: list[list[int]], width: int = 0) -> dict[str, torch.Tensor]:
    padded = pad_left(rows, width=width)
    return {
        "negative_prompt_ids": padded["input_ids"],
        "negative_prompt_attention_mask": padded["attention_mask"],
    }


def collect(run: Any) -> list[list[int]]:
    for _ in run:
        pass
    return list(run.emitted)


WAYS: list[dict[str, Any]] = [
    {},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 2},
    {"prefill_chunk_size": 3, "use_cache": False},
    {"return_dict_in_generate": True},
    {"prompt_logprobs": 1, "return_dict_in_generate": True},
    {"prompt_logprobs": 1, "return_dict_in_generate": True, "cache_implementation": "static"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("has_negative", [True, False])
def test_ragged_batches_equal_the_slow_loop(way: dict[str, Any], has_negative: bool) -> None:
    model = FakeModel()
    negative: list[Any] = NEGATIVE if has_negative else [None] * 4
    extra = pad_negative(NEGATIVE) if has_negative else {}
    found = collect(start(model, **pad_left(ROWS), **extra, guidance_scale=1.7, max_new_tokens=9, **way))
    assert found == [decode_slowly(model, *pair, 1.7, 9) for pair in zip(ROWS, negative, strict=True)]
    assert found != collect(start(model, **pad_left(ROWS), max_new_tokens=9))


@pytest.mark.parametrize("scale", [-1.5, 0, 0.3, 1, 4.0])
def test_scales(scale: float) -> None:
    """Below 1 the negative prompt attracts; at 0 it alone is followed; 1 is plain greedy search."""
    model = FakeModel()
    found = collect(start(model, **pad_left(ROWS), **pad_negative(NEGATIVE), guidance_scale=scale, max_new_tokens=7))
    assert found == [decode_slowly(model, *pair, scale, 7) for pair in zip(ROWS, NEGATIVE, strict=True)]
    if scale == 0:
        assert found == collect(start(model, **pad_left(NEGATIVE), max_new_tokens=7))


def test_one_is_off() -> None:
    model = FakeModel()
    plain = collect(start(model, **pad_left(ROWS), max_new_tokens=6))
    rows = list(model.rows_of_passes)
    assert (
        collect(start(model, **pad_left(ROWS), **pad_negative(NEGATIVE), guidance_scale=1, max_new_tokens=6)) == plain
    )
    assert model.rows_of_passes == rows * 2  # not a row more


def test_both_texts_are_read_in_one_pass() -> None:
    model = FakeModel()
    collect(start(model, **pad_left(ROWS), **pad_negative(NEGATIVE), guidance_scale=2, max_new_tokens=5))
    assert model.rows_of_passes == [8] * 5
    prompts = sum(map(len, ROWS)) + sum(map(len, NEGATIVE))
    assert model.num_tokens_read == prompts + 8 * 4


def test_one_negative_prompt_for_all_rows() -> None:
    model = FakeModel()
    settings = {"guidance_scale": 2.0, "max_new_tokens": 6}
    one = collect(start(model, **pad_left(ROWS), negative_prompt_ids=[[4, 5, 6]], **settings))
    assert one == [decode_slowly(model, row, [4, 5, 6], 2.0, 6) for row in ROWS]


def test_rows_leave_and_nobody_notices() -> None:
    model = FakeModel()
    plain = [decode_slowly(model, *pair, 1.7, 9) for pair in zip(ROWS, NEGATIVE, strict=True)]
    end = plain[2][3]
    settings = {"guidance_scale": 1.7, "max_new_tokens": 9, "eos_token_id": end, "pad_token_id": 0}
    model.rows_of_passes.clear()
    found = collect(start(model, **pad_left(ROWS), **pad_negative(NEGATIVE), **settings))
    assert found == [decode_slowly(model, *pair, 1.7, 9, eos=end) for pair in zip(ROWS, NEGATIVE, strict=True)]
    assert len({len(tokens) for tokens in found}) > 1
    assert model.rows_of_passes[0] == 8 > model.rows_of_passes[-1]
    for row, tokens in enumerate(found):
        alone = start(model, [ROWS[row]], negative_prompt_ids=[NEGATIVE[row]], **settings)
        assert collect(alone) == [tokens]


@pytest.mark.parametrize(
    "way", [{}, {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}, {"num_beams": 3}]
)
def test_stream_equals_collect(way: dict[str, Any]) -> None:
    model = FakeModel()
    settings = {"guidance_scale": 0.4, "max_new_tokens": 7, "seed": 5, **way}
    inputs = {**pad_left(ROWS), **pad_negative(NEGATIVE)}
    streamed: dict[int, list[int]] = {}
    for emitted in stream(model, **inputs, **settings):
        for row, tokens in emitted.tokens.items():
            streamed.setdefault(row, []).extend(tokens)
    assert [streamed[row] for row in range(len(streamed))] == generate(model, **inputs, **settings)[:, 5:].tolist()


def test_sequences_drawn_from_one_prompt_go_their_own_ways() -> None:
    """Each of the copies carries its other text along: a slow loop replays every draw."""
    model = FakeModel()
    settings = {"guidance_scale": 1.4, "max_new_tokens": 6, "do_sample": True, "top_k": 0, "seed": 9}
    settings |= {"num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    for cache in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        output = generate(model, **pad_left(ROWS), **pad_negative(NEGATIVE), **settings, **cache)
        tokens = output.sequences[:, 5:].tolist()
        assert len({tuple(row) for row in tokens}) > 9
        for row, new in enumerate(tokens):
            for step in (0, 1, 5):
                own, other = ROWS[row // 3] + new[:step], NEGATIVE[row // 3] + new[:step]
                torch.testing.assert_close(
                    output.scores[step][row], guide(model, own, other, 1.4), atol=1e-4, rtol=1e-4
                )


def test_frequencies_follow_the_guided_distribution() -> None:
    model, num_draws = FakeModel(vocab=9), 4000
    settings = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 0,
        "max_new_tokens": 1,
        "num_return_sequences": num_draws,
    }
    drawn = generate(model, [[3, 4]], negative_prompt_ids=[[5]], guidance_scale=1.5, seed=2, **settings)[:, -1]
    counts = torch.bincount(drawn, minlength=9).double()
    expected = (guide(model, [3, 4], [5], 1.5) / 3).softmax(-1).double() * num_draws
    possible = expected > 5
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert int(possible.sum()) > 3 and chi_square < critical(int(possible.sum()) - 1)


# --- beams ------------------------------------------------------------------------------------------------------


class GuidedFake(FakeModel):
    """A model whose own logits are the guided ones, by definition: what a search over guided scores must equal."""

    def __init__(self, prompt: list[int], negative: list[int], scale: float) -> None:
        super().__init__()
        self._prompt, self._negative, self._scale = prompt, negative, scale

    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        forward = super().forward(tokens, cache, counts=counts, want=want, embeds=embeds)
        held = cache.key_cache[0][:, 0, :, 0].long().tolist()
        texts = [row[:length] for row, length in zip(held, cache.lengths, strict=True)]
        new = [text[len(self._prompt) :] for text in texts]
        forward.logits = torch.stack([guide(self, self._prompt + n, self._negative + n, self._scale) for n in new])
        return forward


BEAMS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 2},
    {"num_beams": 4, "do_sample": True, "seed": 4, "top_k": 0},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.6},
    {"num_beams": 4, "force_words_ids": [[6, 7]]},
]


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("way", BEAMS, ids=str)
def test_beams_search_the_guided_scores(way: dict[str, Any], cache: dict[str, Any]) -> None:
    prompt, negative = [3, 4, 5], [8, 9, 10, 11]
    settings = {"max_new_tokens": 7, "eos_token_id": 2, "pad_token_id": 0, **way}
    expected = generate(GuidedFake(prompt, negative, 1.6), [prompt], **settings, renormalize_logits=True)
    found = generate(
        FakeModel(),
        [prompt],
        negative_prompt_ids=[negative],
        guidance_scale=1.6,
        renormalize_logits=True,
        **settings,
        **cache,
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, generate(FakeModel(), [prompt], **settings))


@pytest.mark.parametrize("way", BEAMS[:1] + BEAMS[2:], ids=str)
def test_beams_of_a_row_alone_are_those_in_a_batch(way: dict[str, Any]) -> None:
    model = FakeModel()
    settings = {"max_new_tokens": 6, "guidance_scale": 1.6, **way, "num_return_sequences": 1}
    found = generate(model, **pad_left(ROWS), **pad_negative(NEGATIVE), **settings)[:, 5:]
    for row, tokens in enumerate(found.tolist()):
        alone = generate(model, [ROWS[row]], negative_prompt_ids=[NEGATIVE[row]], **settings)
        assert alone[0, len(ROWS[row]) :].tolist() == tokens


# --- what else goes in and comes out -------------------------------------------------------------------------------


def test_outputs_are_the_calls_rows() -> None:
    model = FakeModel()
    inputs, extra = pad_left(ROWS), pad_negative(NEGATIVE)
    wanted = dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states", "output_attentions"), True
    )
    guided = generate(model, **inputs, **extra, guidance_scale=2.0, max_new_tokens=4, logprobs=0, **wanted)
    tokens = guided.sequences[:, 5:]
    first = torch.stack([model.score(row) for row in ROWS])
    torch.testing.assert_close(guided.logits[0], first)  # the model's own
    own = torch.stack([guide(model, *pair, 2.0) for pair in zip(ROWS, NEGATIVE, strict=True)])
    torch.testing.assert_close(guided.scores[0], own, atol=1e-4, rtol=1e-4)
    expected = [float(first[row].log_softmax(-1)[token]) for row, token in enumerate(tokens[:, 0].tolist())]
    assert [row[0].logprob for row in guided.logprobs] == pytest.approx(expected)
    # Whatever else is read beside them, states and attentions are what this text gives without guidance.
    texts = [row + new for row, new in zip(ROWS, tokens[:, :3].tolist(), strict=True)]
    plain = generate(model, **pad_left(ROWS), max_new_tokens=1, **wanted)
    for name in ("hidden_states", "attentions"):
        mine, theirs = getattr(guided, name), getattr(plain, name)
        assert len(mine) == 4
        assert torch.equal(mine[0][0], theirs[0][0])
    assert [states[0].shape[1] for states in guided.hidden_states] == [5, 1, 1, 1]
    assert [weights[0].shape for weights in guided.attentions] == [(4, 1, 5, 5), *((4, 1, 1, 5 + n) for n in (1, 2, 3))]
    # The cache holds the call's rows, and can be gone on with.
    assert guided.past_key_values.lengths == [len(text) for text in texts]
    on = generate(
        model, **pad_left([[*text, 5] for text in texts]), past_key_values=guided.past_key_values, max_new_tokens=3
    )
    assert torch.equal(on, generate(model, **pad_left([[*text, 5] for text in texts]), max_new_tokens=3))


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=str)
def test_past_key_values(way: dict[str, Any]) -> None:
    """A cache of the prompts' beginnings serves the call's rows; it comes back with them alone."""
    model = FakeModel()
    settings = {"guidance_scale": 1.6, "max_new_tokens": 5, **way}
    fresh = generate(model, **pad_left(ROWS[::3]), **pad_negative(NEGATIVE[::3]), **settings)
    cache = DynamicCache()
    model.forward(pad_right(ROWS[::3]), cache, counts=[2, 3])
    held = generate(model, **pad_left(ROWS[::3]), **pad_negative(NEGATIVE[::3]), past_key_values=cache, **settings)
    assert torch.equal(held, fresh)
    if not way:
        assert cache.lengths == [8, 9]
    closed = DynamicCache()
    run = iter(start(model, [[3, 4]], past_key_values=closed, guidance_scale=2.0))
    next(run)
    run.close()
    assert len(closed.lengths) == 1


def pad_right(rows: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


@pytest.mark.parametrize("way", WAYS[:4], ids=str)
def test_embeddings_beside_a_negative_prompt_of_tokens(way: dict[str, Any]) -> None:
    model = FakeModel()
    inputs = pad_left(ROWS)
    settings = {"guidance_scale": 1.7, "max_new_tokens": 6, **way}
    found = generate(
        model,
        inputs_embeds=model.embed(inputs["input_ids"]),
        attention_mask=inputs["attention_mask"],
        **pad_negative(NEGATIVE),
        **settings,
    )
    assert found.tolist() == [decode_slowly(model, *pair, 1.7, 6) for pair in zip(ROWS, NEGATIVE, strict=True)]


@pytest.mark.parametrize("num_new", [1, 2, 3])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_cache_with_room_for_the_longer_text_takes_embeddings_and_the_other_prompt(
    num_new: int, is_given: bool
) -> None:
    model = load_model("llama").model
    embeds = torch.randn(1, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"inputs_embeds": embeds, "negative_prompt_ids": torch.tensor([[9, 8, 7, 6]])}
    settings: dict[str, Any] = {"guidance_scale": 1.7, "max_new_tokens": num_new, "eos_token_id": None}
    room = 7 + max(1, num_new - 1)
    own = {"past_key_values": StaticCache(model.config, max_batch_size=2, max_cache_len=room)} if is_given else {}
    found = generate(model, **given, **settings, **(own or {"cache_implementation": "static"}))
    assert found.tolist() == generate(model, **given, **settings).tolist()
    if is_given:
        small = StaticCache(model.config, max_batch_size=2, max_cache_len=room - 1)
        with pytest.raises(SettingError, match=f"needs {room}, 1 more"):
            generate(model, **given, **settings, past_key_values=small)


@pytest.mark.parametrize(
    "way", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 1}], ids=str
)
def test_an_encoder_reads_the_negative_prompt(way: dict[str, Any]) -> None:
    model = FakeEncoderDecoder(decoder_start_token_id=1)
    sources, negatives = pad_right(ROWS), pad_right(NEGATIVE)
    masks = [
        torch.tensor([[1] * len(row) + [0] * (part.shape[1] - len(row)) for row in rows])
        for rows, part in ((ROWS, sources), (NEGATIVE, negatives))
    ]
    found = generate(
        model,
        sources,
        attention_mask=masks[0],
        negative_prompt_ids=negatives,
        negative_prompt_attention_mask=masks[1],
        decoder_start_token_id=1,
        guidance_scale=1.8,
        max_new_tokens=6,
        **way,
    )
    for row, tokens in enumerate(found.tolist()):
        ids = [1]
        for _ in range(6):
            mine, theirs = (model.score(ids, source=text).log_softmax(-1) for text in (ROWS[row], NEGATIVE[row]))
            ids.append(int((1.8 * (mine - theirs) + theirs).argmax()))
        assert tokens == ids


@pytest.mark.parametrize("said", [{}, {"negative_prompt": ""}], ids=["nothing", "an empty text"])
def test_without_a_negative_prompt_an_encoder_reads_an_empty_text(said: dict[str, Any]) -> None:
    lm = make_lm(FakeEncoderDecoder(vocab=160), has_tokenizer=True)
    assert lm.tokenizer is not None
    lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    told = {"guidance_scale": 1.8, "decoder_start_token_id": 1, "max_new_tokens": 6}
    rows = ["the cat", "stop"]
    expected = lm.generate(rows, negative_prompt=[[2]] * 2, **told).token_ids
    assert lm.generate(rows, **said, **told).token_ids == expected
    assert lm.generate(rows, **{**told, "guidance_scale": 1}).token_ids != expected
    sources = pad_right([lm.tokenizer.encode(row) for row in rows])
    found = generate(lm.model, sources, attention_mask=(sources > 0).long(), tokenizer=lm.tokenizer, **told)
    assert [row[1 : 1 + len(ids)] for row, ids in zip(found.tolist(), expected, strict=True)] == expected
    with pytest.raises(SettingError, match="no tokenizer puts tokens around empty texts"):
        make_lm(FakeEncoderDecoder(vocab=160), has_tokenizer=True).generate("the cat", **said, **told)


def test_a_static_cache_of_the_callers_needs_room_for_both() -> None:
    model = FakeModel()
    cache = model.new_cache("static", 2, 40)
    assert isinstance(cache, StaticCache)
    found = generate(model, [[3, 4]], past_key_values=cache, guidance_scale=1.5, max_new_tokens=5)
    assert found[0, 2:].tolist() == decode_slowly(model, [3, 4], None, 1.5, 5)


@pytest.mark.parametrize("settings", [{"top_k": 4}, {"top_k": 6, "top_p": 0.8, "temperature": 2.0}], ids=str)
def test_the_fused_end_of_the_chain_draws_alike(settings: dict[str, Any]) -> None:
    model = FakeModel()
    common = {"guidance_scale": 1.5, "do_sample": True, "seed": 8, "max_new_tokens": 8, **settings}
    fused = generate(model, **pad_left(ROWS), **pad_negative(NEGATIVE), **common)
    whole = {"return_dict_in_generate": True, "output_scores": True}
    assert torch.equal(generate(model, **pad_left(ROWS), **pad_negative(NEGATIVE), **common, **whole).sequences, fused)
