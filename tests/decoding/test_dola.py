"""DoLa, against a slow loop of its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fakes import FakeLayers, pad_left
from unspool import generate, stream
from unspool.api.starting import start
from unspool.logits import RepetitionPenaltyLogitsProcessor

ROWS = [[3, 4, 5, 6], [7], [8, 9], [11, 4, 2, 6, 5]]
LAYERS = (0, 1, 3, 5)


def contrast_slowly(model: FakeLayers, rows: list[list[int]], layers: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The scores of every row, contrasted with one layer for all of them; that layer."""
    final = torch.stack([model.score(ids) for ids in rows])
    p = final.softmax(-1)
    divergences = []
    for layer in layers:
        q = torch.stack([model.score_layer(ids, layer) for ids in rows]).softmax(-1)
        m = (p + q) / 2
        each = (F.kl_div(p.log(), m, reduction="none") + F.kl_div(q.log(), m, reduction="none")).mean(-1) / 2
        divergences.append(float(each.mean()))
    layer = layers[max(range(len(layers)), key=lambda place: divergences[place])]
    base = torch.stack([model.score_layer(ids, layer) for ids in rows]).log_softmax(-1)
    scores = p.log() - base
    scores[p < 0.1 * p.max(-1, keepdim=True).values] = float("-inf")
    return scores, layer


def decode_slowly(
    model: FakeLayers, rows: list[list[int]], num_new: int, layers: tuple[int, ...] = LAYERS, penalty: float = 1.0
) -> tuple[list[list[int]], list[int]]:
    """New tokens of rows that choose one layer together, and the layers chosen."""
    histories, chosen = [list(row) for row in rows], []
    for _ in range(num_new):
        scores, layer = contrast_slowly(model, histories, layers)
        chosen.append(layer)
        for row, ids in enumerate(histories):
            shaped = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), scores[row : row + 1])
            ids.append(int(shaped.argmax()))
    return [ids[len(row) :] for ids, row in zip(histories, rows, strict=True)], chosen


WAYS: list[dict[str, Any]] = [
    {},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 2},
    {"return_dict_in_generate": True},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_equal_the_slow_loop(way: dict[str, Any]) -> None:
    """In the reference's manner one layer is chosen for the whole batch."""
    model = FakeLayers()
    expected, layers = decode_slowly(model, ROWS, 9)
    assert len(set(layers)) > 1
    run = start(model, **pad_left(ROWS), dola_layers=list(LAYERS), max_new_tokens=9, **way)
    for _ in run:
        pass
    assert run.emitted == expected
    assert run.dola_layers == [layers] * 4
    if way.get("return_dict_in_generate"):
        assert run.output().dola_layers == [layers] * 4


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_rows_choose_by_themselves_where_padding_is_hidden(way: dict[str, Any]) -> None:
    model = FakeLayers()
    alone = [decode_slowly(model, [row], 9) for row in ROWS]
    run = start(model, **pad_left(ROWS), dola_layers=list(LAYERS), max_new_tokens=9, hides_padding=True, **way)
    for _ in run:
        pass
    assert run.emitted == [tokens for (tokens,), _ in alone]
    assert run.dola_layers == [layers for _, layers in alone]
    assert len({tuple(layers) for layers in run.dola_layers}) > 1


def test_one_layer_needs_no_choice() -> None:
    model = FakeLayers()
    for layer in (0, 4):
        expected, _ = decode_slowly(model, ROWS, 5, (layer,))
        run = start(model, **pad_left(ROWS), dola_layers=[layer], max_new_tokens=5)
        assert [list(emitted.tokens.values()) for emitted in run][-1] == [[row[-1]] for row in expected]
        assert run.dola_layers == [[layer] * 5] * 4


def test_tables_are_those_of_the_model() -> None:
    for tied, low in ((False, (0, 2)), (True, (2,))):
        model = FakeLayers(has_tied_embeddings=tied)
        for word, layers in (("low", low), ("high", (3, 5))):
            expected, chosen = decode_slowly(model, ROWS, 6, layers)
            run = start(model, **pad_left(ROWS), dola_layers=word, max_new_tokens=6)
            for _ in run:
                pass
            assert run.emitted == expected
            assert run.dola_layers == [chosen] * 4


def test_processors_see_the_contrast_and_logits_are_the_models() -> None:
    model = FakeLayers()
    expected, _ = decode_slowly(model, ROWS, 6, penalty=1.3)
    output = generate(
        model,
        **pad_left(ROWS),
        dola_layers=list(LAYERS),
        repetition_penalty=1.3,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        logprobs=0,
    )
    assert output.sequences[:, -6:].tolist() == expected
    final = torch.stack([model.score(ids) for ids in ROWS])
    torch.testing.assert_close(output.logits[0], final)
    scores, _ = contrast_slowly(model, ROWS, LAYERS)
    ids = pad_left(ROWS)["input_ids"]
    torch.testing.assert_close(output.scores[0], RepetitionPenaltyLogitsProcessor(1.3)(ids, scores))
    assert [row[0].logprob for row in output.logprobs] == pytest.approx(
        [float(final[row].log_softmax(-1)[tokens[0]]) for row, tokens in enumerate(expected)]
    )
    assert len(output.hidden_states) == 6


def test_rows_that_are_done_keep_their_say() -> None:
    """Whether an output object is asked for or not, the batch chooses alike: a row that ended goes on as padding."""
    model = FakeLayers()
    plain, _ = decode_slowly(model, ROWS, 9)
    end = plain[1][2]
    settings = {"dola_layers": list(LAYERS), "max_new_tokens": 9, "eos_token_id": end, "pad_token_id": 0}
    whole = generate(model, **pad_left(ROWS), **settings, return_dict_in_generate=True)
    short = generate(model, **pad_left(ROWS), **settings)
    assert torch.equal(whole.sequences, short)
    assert [len(row) for row in whole.dola_layers] == [
        next((place + 1 for place, token in enumerate(row) if token == end), 9)
        for row in whole.sequences[:, 5:].tolist()
    ]
    by_row = start(model, **pad_left(ROWS), **settings, hides_padding=True)
    for _ in by_row:
        pass
    for row, tokens in enumerate(by_row.emitted):  # rows leave, and nobody else notices
        (alone,), chosen = decode_slowly(model, [ROWS[row]], 9)
        assert tokens == alone[: len(tokens)] and by_row.dola_layers[row] == chosen[: len(tokens)]


def test_stream_equals_collect() -> None:
    model = FakeLayers()
    settings = {"dola_layers": "high", "max_new_tokens": 7, "do_sample": True, "seed": 3, "temperature": 2.0}
    streamed: list[list[int]] = [[] for _ in ROWS]
    for emitted in stream(model, **pad_left(ROWS), **settings):
        for row, tokens in emitted.tokens.items():
            streamed[row] += tokens
    assert generate(model, **pad_left(ROWS), **settings)[:, 5:].tolist() == streamed


def test_embeddings_and_several_sequences() -> None:
    model = FakeLayers()
    ids = torch.tensor([[3, 4, 5]])
    expected, layers = decode_slowly(model, [[3, 4, 5]], 5)
    output = generate(
        model, inputs_embeds=model.embed(ids), dola_layers=list(LAYERS), max_new_tokens=5, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected and output.dola_layers == [layers]
    several = generate(
        model, ids, dola_layers=[1], do_sample=True, num_return_sequences=4, max_new_tokens=6, seed=1, top_k=0
    )
    first = contrast_slowly(model, [[3, 4, 5]], (1,))[0][0]
    assert several.shape == (4, 9) and all(first[token] > float("-inf") for token in several[:, 3].tolist())
