from __future__ import annotations

import torch

from unspool import (
    DRYLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

INF = float("inf")


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    scores = torch.tensor([[2.0, -2.0, 3.0, 0.0, -1.0]])
    ids = torch.tensor([[0, 1, 0, 3]])
    assert RepetitionPenaltyLogitsProcessor(2.0)(ids, scores).tolist() == [[1.0, -4.0, 3.0, 0.0, -1.0]]
    left_out = RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=1)(ids, scores)
    assert left_out.tolist() == [[1.0, -4.0, 3.0, 0.0, -1.0]]
    assert RepetitionPenaltyLogitsProcessor(2.0, 3)(ids, scores).tolist() == scores.tolist()
    assert RepetitionPenaltyLogitsProcessor(2.0, 4)(ids, scores) is scores
    assert RepetitionPenaltyLogitsProcessor(2.0).penalty == 2.0


def test_encoder_repetition_makes_what_was_read_likelier() -> None:
    scores = torch.tensor([[2.0, -2.0, 3.0], [2.0, -2.0, 3.0]])
    processor = EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([[0, 1, -1], [2, -1, -1]]))
    assert processor.penalty == 0.5
    assert processor.encoder_input_ids.tolist() == [[0, 1, -1], [2, -1, -1]]
    assert processor.select_rows(torch.tensor([1])).encoder_input_ids.tolist() == [[2, -1, -1]]
    assert processor(torch.zeros(2, 1), scores).tolist() == [[4.0, -1.0, 3.0], [2.0, -2.0, 6.0]]
    beams = processor(torch.zeros(4, 1), scores.repeat_interleave(2, 0))  # rows of one prompt stand side by side
    assert beams.tolist() == processor(torch.zeros(2, 1), scores).repeat_interleave(2, 0).tolist()


def test_presence_counts_once_and_frequency_every_time() -> None:
    scores = torch.zeros(1, 4)
    ids = torch.tensor([[3, 1, 1, 2, 1]])
    assert PresencePenaltyLogitsProcessor(0.5)(ids, scores).tolist() == [[0.0, -0.5, -0.5, -0.5]]
    assert PresencePenaltyLogitsProcessor(0.5, 1)(ids, scores).tolist() == [[0.0, -0.5, -0.5, 0.0]]
    assert FrequencyPenaltyLogitsProcessor(0.5)(ids, scores).tolist() == [[0.0, -1.5, -0.5, -0.5]]
    assert FrequencyPenaltyLogitsProcessor(-0.5, 2)(ids, scores).tolist() == [[0.0, 1.0, 0.5, 0.0]]
    assert FrequencyPenaltyLogitsProcessor(0.5, 5)(ids, scores) is scores


def test_padding_is_left_out_where_it_is_told() -> None:
    """Token 0 fills the first row on the left; the second row alone must come out the same."""
    ids = torch.tensor([[0, 0, 0, 4, 5, 4, 5, 4], [4, 5, 4, 5, 4, 5, 4, 5]])
    scores = torch.linspace(-2, 2, 7).repeat(2, 1)
    pads = torch.tensor([3, 0])
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.5),
        RepetitionPenaltyLogitsProcessor(1.5, 2),
        PresencePenaltyLogitsProcessor(1.0),
        FrequencyPenaltyLogitsProcessor(1.0),
        NoRepeatNGramLogitsProcessor(1),
        NoRepeatNGramLogitsProcessor(2),
        DRYLogitsProcessor(1.0),
    ):
        told = processor(ids, scores, pads)
        ignored = getattr(processor, "prompt_ignore_length", None)
        alone = type(processor)(1.5) if ignored else processor
        assert torch.equal(told[0], alone(ids[:1, 3:], scores[:1])[0])
        assert torch.equal(told[1], processor(ids[1:], scores[1:])[0])


def test_no_repeat_ngram_forbids_what_would_end_a_known_one() -> None:
    ids = torch.tensor([[1, 1, 2, 1], [0, 1, 0, 1]])
    scores = torch.zeros(2, 3)
    assert NoRepeatNGramLogitsProcessor(2)(ids, scores).tolist() == [[0.0, -INF, -INF], [-INF, 0.0, 0.0]]
    assert NoRepeatNGramLogitsProcessor(3)(ids, scores).tolist() == [[0.0, 0.0, 0.0], [-INF, 0.0, 0.0]]
    assert NoRepeatNGramLogitsProcessor(4)(ids, scores).tolist() == scores.tolist()
    assert NoRepeatNGramLogitsProcessor(9)(ids, scores) is scores


def test_encoder_ngrams_are_those_of_the_row_that_was_read() -> None:
    read = torch.tensor([[1, 2, 1, 0], [-1, 0, 1, 2]])
    ids = torch.tensor([[0, 1], [0, 1]])
    scores = torch.zeros(2, 4)
    one = EncoderNoRepeatNGramLogitsProcessor(1, read)(ids, scores)
    assert one.tolist() == [[-INF, -INF, -INF, 0.0], [-INF, -INF, -INF, 0.0]]
    two = EncoderNoRepeatNGramLogitsProcessor(2, read)(ids, scores)
    assert two.tolist() == [[-INF, 0.0, -INF, 0.0], [0.0, 0.0, -INF, 0.0]]
    assert EncoderNoRepeatNGramLogitsProcessor(2, read[0]).batch_size == 1


def dry_by_hand(
    ids: list[int], vocab: int, multiplier: float, base: float, allowed: int, breakers: set[int]
) -> list[float]:
    """The definition, token by token: how long is the repetition that each token would carry on?"""
    lengths = [0] * vocab
    for place in range(1, len(ids)):
        same = 0
        while same < place and ids[place - 1 - same] == ids[len(ids) - 1 - same] not in breakers and same < 50:
            same += 1
        lengths[ids[place]] = max(lengths[ids[place]], same)
    return [-multiplier * base ** (n - allowed) if n >= allowed else 0.0 for n in lengths]


def test_dry_grows_with_the_length_of_the_repetition() -> None:
    scores = torch.zeros(1, 6)
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    found = DRYLogitsProcessor(0.5, 2.0, 2)(ids, scores)
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0, -1.0, 0.0]]  # 4 would repeat 1 2 3: 0.5 * 2 ** (3 - 2)
    broken = DRYLogitsProcessor(0.5, 2.0, 2, [1])(ids, scores)
    assert broken.tolist() == [[0.0, 0.0, 0.0, 0.0, -0.5, 0.0]]  # no match reaches across 1
    assert DRYLogitsProcessor(0.5, 2.0, 4)(ids, scores).tolist() == scores.tolist()
    assert DRYLogitsProcessor(0.5, 2.0, 2, [3])(ids, scores).tolist() == scores.tolist()


def test_dry_equals_its_definition() -> None:
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        width = int(torch.randint(1, 90, (1,), generator=generator))
        ids = torch.randint(0, 3 if seed % 2 else 5, (3, width), generator=generator)
        if seed % 3 == 0:
            ids = ids[:, : max(1, width // 3)].repeat(1, 3)  # long repetitions
        found = DRYLogitsProcessor(0.7, 1.3, 2, [2])(ids, torch.zeros(3, 6))
        expected = [dry_by_hand(row, 6, 0.7, 1.3, 2, {2}) for row in ids.tolist()]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
