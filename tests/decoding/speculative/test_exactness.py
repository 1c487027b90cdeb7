"""Speculation never changes the output: every drafter against decoding without one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model
from tests.decoding.speculative.drafting_fakes import DRAFTERS, Layered, blur, make_drafters
from tests.fakes import FakeEncoderDecoder, make_tokenizer, pad_left
from unspool import StoppingCriteria, generate, stream
from unspool.cache import DynamicCache

VOCAB = 9  # small, so that texts repeat themselves and drafts are often right
ROWS = [[1, 2, 3, 1, 2], [4], [5, 6, 5], [7, 1, 7, 1, 7, 1, 7, 1], [3, 3, 3]]
BATCHES = {"alone": [ROWS[0]], "ragged": ROWS}
CACHES = ("dynamic", "static")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ends": {"eos_token_id": [0, 8]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "eos_token_id": 0},
    "ignoring the prompt": {"repetition_penalty": 1.5, "repetition_penalty_ignores_prompt": True},
    "ngrams": {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 4, "dry_multiplier": 0.8},
    "columns": {
        "eos_token_id": [0, 5, 6],
        "min_length": 14,
        "min_new_tokens": 9,
        "forced_eos_token_id": 6,
        "exponential_decay_length_penalty": (10, 1.3),
        "begin_suppress_tokens": [3, 4],
    },
    "words": {"bad_words_ids": [[1, 2], [7]], "sequence_bias": [[[5, 6], 4.0]], "suppress_tokens": [3]},
    "by row": {"repetition_penalty": [1.0, 1.2, 1.5, 0.9, 1.1], "min_new_tokens": [1, 7, 3, 9, 5], "eos_token_id": 0},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row) % VOCAB, int(ids[-1]), len(ids) % 5]},
    "custom": {"logits_processor": [lambda ids, scores: scores + torch.arange(9) * (ids.shape[1] % 3)]},
}


def settings_for(name: str, batch: str) -> dict[str, Any]:
    """The settings of a name; what is given a row is cut to the rows."""
    return {
        key: value[: len(BATCHES[batch])] if name == "by row" and isinstance(value, list) else value
        for key, value in SETTINGS[name].items()
    }


MATRIX = [
    (drafter, batch, kind, name)
    for drafter in DRAFTERS
    for batch in BATCHES
    for kind in CACHES
    for name in SETTINGS
    if kind == "dynamic" or name in ("plain", "columns", "by row")  # what a cache holds, processors never see
    if drafter in ("lookup", "model", "early exit") or name in ("plain", "penalties", "columns")
]


@lru_cache
def decode_plainly(batch: str, name: str) -> tuple[list[list[int]], int]:
    """The tokens without a drafter, and how many passes they took."""
    target = Layered(VOCAB)
    plain = generate(target, **pad_left(BATCHES[batch]), max_new_tokens=18, **settings_for(name, batch))
    return plain.tolist(), target.num_passes


@pytest.mark.parametrize(("drafter", "batch", "kind", "name"), MATRIX)
def test_greedy_equals_plain_greedy(drafter: str, batch: str, kind: str, name: str) -> None:
    target = Layered(VOCAB)
    call = {**pad_left(BATCHES[batch]), "max_new_tokens": 18, **settings_for(name, batch)}
    plain, passes = decode_plainly(batch, name)
    output = generate(
        target,
        **call,
        **make_drafters(target)[drafter],
        cache_implementation=kind,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain
    told = output.speculation
    assert all(0 <= a <= d for a, d in zip(told.accepted, told.drafted, strict=True))
    if not drafter.startswith("auto"):
        assert sum(told.drafted) > 0
        assert target.num_passes <= passes  # a draft never costs a pass of the model
    if name == "plain" and drafter in ("model", "early exit"):
        assert sum(told.accepted) > 5
        assert target.num_passes < passes


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", ["lookup", "auto"])
def test_drawing_with_the_only_guess_gives_the_very_tokens(drafter: str, batch: str, name: str) -> None:
    """A drafter that does not draw leaves the draws as they are: the same seed gives the same text."""
    target = Layered(VOCAB)
    for seed, sampling in enumerate(({}, {"temperature": 0.6, "top_k": 4, "top_p": 0.9}, {"xtc_probability": 0.5})):
        call = {**pad_left(BATCHES[batch]), "max_new_tokens": 16, "do_sample": True, "seed": seed, **sampling}
        call |= settings_for(name, batch)
        assert generate(target, **call, **make_drafters(target)[drafter]).tolist() == generate(target, **call).tolist()


@pytest.mark.parametrize("drafter", ["lookup", "model", "early exit"])
def test_drawn_rows_alone_are_rows_in_the_batch(drafter: str) -> None:
    """Rows that leave, and those beside them, change nothing of a row's draws.

    A moving threshold and the automatic policy look at all rows (and the clock): with those, the distribution stays.
    """
    target = Layered(VOCAB)
    more = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": 0, "temperature": 0.8}
    more |= make_drafters(target)[drafter]
    whole = generate(target, **pad_left(ROWS), seed=[5, 6, 7, 8, 9], **more)
    width = max(map(len, ROWS))
    for row, prompt in enumerate(ROWS):
        alone = generate(target, [prompt], seed=5 + row, **more)[0, len(prompt) :].tolist()
        assert whole[row, width : width + len(alone)].tolist() == alone


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("drafter", ["lookup", "model", "early exit"])
def test_real_layers_and_their_caches(drafter: str, kind: str) -> None:
    target = load_model("llama").model
    import unspool
    from tests.conformance.cases import GOLDENS

    twin = unspool.load(GOLDENS / "models" / "llama").model  # always right
    arguments = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "model": {"assistant_model": twin, "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
        "early exit": {"assistant_early_exit": 3, "num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0},
    }[drafter]
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (9, 3, 14, 6, 5)]
    call = {**pad_left(rows), "max_new_tokens": 30, "cache_implementation": kind, "return_dict_in_generate": True}
    plain = generate(target, **call)
    output = generate(target, **call, **arguments)
    assert output.sequences.tolist() == plain.sequences.tolist()
    if drafter == "model":
        assert output.speculation.acceptance == 1.0
        assert output.stats.forward_passes == 1 + -(-29 // 6)
    continued = torch.cat((output.sequences, output.sequences[:, :1] * 0 + 5), dim=1)
    mask = torch.cat((call["attention_mask"], torch.ones(5, 31, dtype=torch.int64)), dim=1)
    if kind == "dynamic":  # the cache that comes back is as good as a new one
        again = generate(
            target, continued, attention_mask=mask, past_key_values=output.past_key_values, max_new_tokens=4
        )
        assert again.tolist() == generate(target, continued, attention_mask=mask, max_new_tokens=4).tolist()


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_encoder_decoders(drafter: str) -> None:
    target = FakeEncoderDecoder(VOCAB)
    arguments = make_drafters(target, 0.3)[drafter]
    sources = torch.tensor([[1, 2, 3, 4, 1], [2, 2, 5, 0, 0], [6, 7, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    for more in ({}, {"do_sample": True, "num_return_sequences": 2, "seed": 4} if drafter == "lookup" else {}):
        call = {"input_ids": sources, "attention_mask": mask, "decoder_start_token_id": 1, "max_new_tokens": 20, **more}
        plain = generate(target, **call, forced_bos_token_id=4, eos_token_id=0)
        assert generate(target, **call, forced_bos_token_id=4, eos_token_id=0, **arguments).tolist() == plain.tolist()
    assert target.num_encodings == 2 * 2


def test_t5_drafts_from_its_source() -> None:
    target = load_model("t5").model
    ids = torch.tensor([[5, 9, 7, 20, 33, 9, 7, 21]])
    plain = generate(target, ids, max_new_tokens=20)
    assert generate(target, ids, max_new_tokens=20, prompt_lookup_num_tokens=4).tolist() == plain.tolist()


# --- stops inside a draft -----------------------------------------------------------------------------------


class Told(StoppingCriteria):
    """Ends a row at a width of its own, and remembers what it was shown."""

    def __init__(self, widths: list[int]) -> None:
        self.widths, self.shown = widths, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shown.append(input_ids.shape)
        return torch.tensor([input_ids.shape[1] >= width for width in self.widths])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("stop", ["criteria", "strings", "length", "ends"])
def test_a_stop_inside_a_draft_ends_the_row_there(drafter: str, stop: str) -> None:
    vocab = 160 if stop == "strings" else VOCAB
    target = Layered(vocab)
    rows = [[70 + token for token in row] for row in ROWS] if stop == "strings" else ROWS
    for number in (0, 3, 5):
        more: dict[str, Any] = {"max_new_tokens": 20}
        if stop == "criteria":
            more["stopping_criteria"] = [Told([10 + number, 12, 11 + number, 20, 9])]
        elif stop == "strings":
            written = generate(target, **pad_left(rows), max_new_tokens=20)[0, 8:].tolist()
            text = make_tokenizer().decode(written[number + 3 : number + 5])
            more |= {"tokenizer": make_tokenizer(), "stop_strings": [text or "x"]}
        elif stop == "length":
            more = {"max_length": 9 + number}
        else:
            more["eos_token_id"] = [number, (number + 4) % 9]
        plain = generate(target, **pad_left(rows), **more, return_dict_in_generate=True)
        output = generate(
            target, **pad_left(rows), **more, **make_drafters(target)[drafter], return_dict_in_generate=True
        )
        assert output.sequences.tolist() == plain.sequences.tolist()
        assert output.past_key_values.lengths == [
            min(held, length)
            for held, length in zip(output.past_key_values.lengths, plain.past_key_values.lengths, strict=True)
        ]


# --- what comes beside the tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs_scores_and_logits_are_those_of_plain_decoding(drafter: str) -> None:
    target = Layered(VOCAB)
    call = {
        **pad_left(ROWS),
        "max_new_tokens": 15,
        "eos_token_id": 0,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "logprobs": 2,
    }
    plain, output = generate(target, **call), generate(target, **call, **make_drafters(target)[drafter])
    assert output.sequences.tolist() == plain.sequences.tolist()
    for row, told in enumerate(output.logprobs):
        assert [one.token_id for one in told] == [one.token_id for one in plain.logprobs[row]]
        for one, other in zip(told, plain.logprobs[row], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert len(output.scores) == len(output.logits) == len(plain.scores)
    for row, told in enumerate(plain.logprobs):
        for step in range(len(told)):
            torch.testing.assert_close(output.scores[step][row], plain.scores[step][row])
            torch.testing.assert_close(output.logits[step][row], plain.logits[step][row])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_stream_collected_is_the_result(drafter: str) -> None:
    target = Layered(VOCAB)
    call = {**pad_left(ROWS), "max_new_tokens": 15, "eos_token_id": 0}
    plain = generate(target, **call)
    rows: list[list[int]] = [[] for _ in ROWS]
    longest = 0
    for emitted in stream(target, **call, **make_drafters(target, 0.2)[drafter]):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
            longest = max(longest, len(tokens))
    for row, tokens in enumerate(rows):
        assert plain[row, 8 : 8 + len(tokens)].tolist() == tokens
    if drafter in ("model", "early exit"):
        assert longest > 1


def test_rows_that_end_leave_the_drafter_too() -> None:
    target = Layered(VOCAB)
    draft = blur(target, 0.5)
    generate(
        target,
        **pad_left(ROWS),
        max_new_tokens=40,
        eos_token_id=[0, 3],
        assistant_model=draft,
        assistant_confidence_threshold=0.0,
    )
    assert draft.rows_of_passes[0] > draft.rows_of_passes[-1]
    assert target.rows_of_passes[-1] < 5


def test_a_prompt_of_embeddings() -> None:
    target = Layered(VOCAB)
    embeds = target.embed(torch.tensor([[1, 2, 3, 1, 2]]))
    plain = generate(target, inputs_embeds=embeds, max_new_tokens=20)
    for name in ("lookup", "early exit"):
        drafted = generate(target, inputs_embeds=embeds, max_new_tokens=20, **make_drafters(target)[name])
        assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_continuing_from_a_cache(drafter: str) -> None:
    target = Layered(VOCAB)
    plain = generate(target, [ROWS[0]], max_new_tokens=20)
    cache = DynamicCache()
    target.forward(torch.tensor([ROWS[0][:3]]), cache)
    drafted = generate(target, [ROWS[0]], past_key_values=cache, max_new_tokens=20, **make_drafters(target)[drafter])
    assert drafted.tolist() == plain.tolist()


def test_several_answers_a_prompt() -> None:
    target = Layered(VOCAB)
    call = {**pad_left(ROWS), "max_new_tokens": 15, "do_sample": True, "num_return_sequences": 3, "seed": 2}
    plain = generate(target, **call)
    assert generate(target, **call, prompt_lookup_num_tokens=4).tolist() == plain.tolist()
    drawn = generate(target, **call, **make_drafters(target)["model"])
    assert drawn.shape[0] == 15 and len({tuple(row) for row in drawn.tolist()}) == 15
