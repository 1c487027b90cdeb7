from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from unspool import (
    ClassifierFreeGuidanceLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    HammingDiversityLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

INF = float("inf")
IDS = torch.tensor([[0, 1, 3, 1], [0, 1, 0, 1]])


def test_sequence_bias_in_both_forms() -> None:
    scores = torch.zeros(2, 5)
    as_dict = SequenceBiasLogitsProcessor({(4,): 1.0, (1, 2): 2.0, (3, 1, 2): -3.0})
    as_list = SequenceBiasLogitsProcessor([[[4], 1.0], [[1, 2], 2.0], [[3, 1, 2], -3.0]])
    expected = [[0.0, 0.0, -1.0, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0, 1.0]]
    assert as_dict(IDS, scores).tolist() == as_list(IDS, scores).tolist() == expected
    assert as_list.sequence_bias == {(4,): 1.0, (1, 2): 2.0, (3, 1, 2): -3.0}
    longer_than_the_text = SequenceBiasLogitsProcessor({(0, 1, 3, 1, 0, 2): 1.0})
    assert longer_than_the_text(IDS, scores) is scores
    with pytest.raises(ValueError, match=r"vocabulary size is 5.*\[7\]"):
        SequenceBiasLogitsProcessor({(7,): 1.0})(IDS, scores)


def test_logit_bias_takes_ids_as_a_json_file_spells_them() -> None:
    scores = torch.zeros(2, 3)
    assert LogitBiasLogitsProcessor({"1": 2, 2: -INF})(IDS, scores).tolist() == [[0.0, 2.0, -INF]] * 2


def test_bad_words_spare_the_end_token() -> None:
    scores = torch.zeros(2, 5)
    found = NoBadWordsLogitsProcessor([[2], [1, 3], [3, 1, 4], [0]], eos_token_id=[0])(IDS, scores)
    assert found.tolist() == [[0.0, 0.0, -INF, -INF, -INF], [0.0, 0.0, -INF, -INF, 0.0]]
    assert NoBadWordsLogitsProcessor([[2], [0]], eos_token_id=[0, 2])(IDS, scores).tolist() == scores.tolist()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SequenceBiasLogitsProcessor({}), "non-empty"),
        (lambda: SequenceBiasLogitsProcessor([[[], 1.0]]), "sequence of 0 tokens"),
        (lambda: SequenceBiasLogitsProcessor({(1,): float("nan")}), "a number"),
        (lambda: SequenceBiasLogitsProcessor({(-1,): 1.0}), "positive integers"),
        (lambda: SequenceBiasLogitsProcessor([[1, 2.0]]), "pairs"),
        (lambda: LogitBiasLogitsProcessor({}), "non-empty"),
        (lambda: LogitBiasLogitsProcessor({"x": 1.0}), "token ids as keys"),
        (lambda: NoBadWordsLogitsProcessor([]), "non-empty list"),
        (lambda: NoBadWordsLogitsProcessor([[]]), "sequence of 0 tokens"),
        (lambda: NoBadWordsLogitsProcessor([1, 2]), "list of lists"),
        (lambda: NoBadWordsLogitsProcessor([[-1]]), "positive integers"),
        (lambda: MinLengthLogitsProcessor(-1, 2), "min_length"),
        (lambda: MinLengthLogitsProcessor(3, 1.5), "eos_token_id"),
        (lambda: ForcedEOSTokenLogitsProcessor(3, -2), "eos_token_id"),
        (lambda: ForcedEOSTokenLogitsProcessor(3, torch.tensor([0.5])), "token ids"),
        (lambda: ExponentialDecayLengthPenalty((1, 0.0), 2, 0), "factor above 0"),
        (lambda: ExponentialDecayLengthPenalty((-1, 1.5), 2, 0), "at least 0"),
        (lambda: ExponentialDecayLengthPenalty(3, 2, 0), "a pair"),
        (lambda: ClassifierFreeGuidanceLogitsProcessor(1.0), "above 1"),
        (lambda: HammingDiversityLogitsProcessor(0.0, 4, 2), "larger than 0"),
        (lambda: HammingDiversityLogitsProcessor(1.0, 1, 2), "num_beams"),
        (lambda: HammingDiversityLogitsProcessor(1.0, 2, 3), "num_beam_groups"),
        (lambda: PrefixConstrainedLogitsProcessor(None, 1), "has to be a function"),
        (lambda: WhisperTimeStampLogitsProcessor(SimpleNamespace()), "begin_index"),
    ],
)
def test_what_cannot_be_is_refused(make, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_forced_tokens_at_their_place_alone() -> None:
    scores = torch.ones(2, 4)
    forced = [[-INF, -INF, 0.0, -INF]] * 2
    assert ForcedBOSTokenLogitsProcessor(2)(IDS[:, :1], scores).tolist() == forced
    assert ForcedBOSTokenLogitsProcessor(2)(IDS, scores) is scores
    assert ForcedEOSTokenLogitsProcessor(5, 2)(IDS, scores).tolist() == forced
    assert ForcedEOSTokenLogitsProcessor(6, 2)(IDS, scores) is scores
    begin = SuppressTokensAtBeginLogitsProcessor([0, 3], 4)
    assert begin(IDS, scores).tolist() == [[-INF, 1.0, 1.0, -INF]] * 2
    begin.set_begin_index(5)
    assert begin(IDS, scores) is scores


def test_prefix_names_rows_by_their_number_in_the_call() -> None:
    asked: list[tuple[int, list[int]]] = []

    def allow(row: int, ids: torch.Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        return [row]

    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    processor = PrefixConstrainedLogitsProcessor(allow, 1)
    assert processor(IDS, scores).tolist() == [[1.0, -INF, -INF], [-INF, 5.0, -INF]]
    assert asked == [(0, IDS[0].tolist()), (1, IDS[1].tolist())]
    second = processor.select_rows(torch.tensor([1]))
    assert second(IDS[1:], scores[1:]).tolist() == [[-INF, 5.0, -INF]]
    with pytest.raises(ValueError, match="empty list for batch ID 0"):
        PrefixConstrainedLogitsProcessor(lambda row, ids: [], 1)(IDS, scores)
    with pytest.raises(ValueError, match="outside the vocabulary of 3"):
        PrefixConstrainedLogitsProcessor(lambda row, ids: [3], 1)(IDS, scores)
    beams = PrefixConstrainedLogitsProcessor(lambda row, ids: [row], 2)(IDS, scores)
    assert beams.tolist() == [[1.0, -INF, -INF], [4.0, -INF, -INF]]
    group = PrefixConstrainedLogitsProcessor(lambda row, ids: [row], 3).select_rows(torch.tensor([0, 3]))
    assert group(IDS, scores).tolist() == [[1.0, -INF, -INF], [-INF, 5.0, -INF]]  # a beam of three of each prompt
    forbidden = scores.masked_fill(torch.tensor([True, False, False]), -INF)
    assert processor(IDS, forbidden)[0].tolist() == [0.0, -INF, -INF]  # allowed against all others


def test_decay_does_not_run_over() -> None:
    scores = torch.tensor([[2.0, -INF, 0.0, -1.0]])
    penalty = ExponentialDecayLengthPenalty((0, 10.0), [0, 1, 2, 3], 0)
    found = penalty(torch.zeros(1, 5000, dtype=torch.long), scores)
    most = torch.finfo(torch.float32).max
    assert found[0, 0] == most
    assert found[0, 1:3].tolist() == [-INF, 0.0]
    assert found[0, 3] == most
    once = penalty(torch.zeros(1, 1, dtype=torch.long), scores)
    assert once.tolist() == [[20.0, -INF, 0.0, 8.0]]


def test_inf_nan_are_replaced() -> None:
    scores = torch.tensor([[float("nan"), INF, -INF, 1.0]])
    limits = torch.finfo(torch.float32)
    assert InfNanRemoveLogitsProcessor()(IDS, scores).tolist() == [[0.0, limits.max, limits.min, 1.0]]


def test_hamming_takes_what_earlier_groups_chose() -> None:
    """4.52.4's own test: two batch entries, four beams in two groups."""
    processor = HammingDiversityLogitsProcessor(1.0, num_beams=2, num_beam_groups=2)
    scores = torch.full((2, 4), 0.25)
    chosen = torch.tensor([0, 3, 1, 2])
    found = processor(IDS, scores, current_tokens=chosen, beam_group_idx=1)
    assert found.tolist() == [[-0.75, 0.25, 0.25, 0.25], [0.25, -0.75, 0.25, 0.25]]
    assert processor(IDS, scores, current_tokens=chosen, beam_group_idx=0) is scores
    three = HammingDiversityLogitsProcessor(0.5, 6, 3)
    found = three(IDS, torch.zeros(2, 4), current_tokens=torch.tensor([1, 1, 2, 1, 0, 0]), beam_group_idx=2)
    assert found.tolist() == [[0.0, -1.5, -0.5, 0.0]] * 2


def test_guidance_of_two_halves() -> None:
    scores = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    guided = ClassifierFreeGuidanceLogitsProcessor(2.0)(IDS[:1], scores)
    assert guided.tolist() == [[0.0, 4.0]]
    with pytest.raises(ValueError, match="twice the batch size"):
        ClassifierFreeGuidanceLogitsProcessor(2.0)(IDS, scores)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("has_ids", [True, False])
def test_unbatched_guidance_calls_a_model_as_the_reference_does(use_cache: bool, has_ids: bool) -> None:
    class Model:
        def __init__(self) -> None:
            self.calls: list[tuple] = []

        def __call__(self, ids, attention_mask, use_cache, past_key_values):
            self.calls.append((ids.tolist(), attention_mask.tolist(), use_cache, past_key_values))
            logits = torch.nn.functional.one_hot(ids, 5).float().cumsum(1) * 2

            class Out(dict):
                __getattr__ = dict.__getitem__

            return Out(logits=logits, past_key_values=f"after {len(self.calls)}")

    ours, theirs = Model(), Model()
    ids = torch.tensor([[3, 1], [2, 2]]) if has_ids else None
    arguments = {"unconditional_ids": ids, "use_cache": use_cache}
    mine = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, ours, **arguments)
    other = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, theirs, **arguments)
    for step in range(1, 4):
        history = IDS[:, : step + 1]
        scores = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(mine(history, scores), other(history, scores))
    if use_cache or has_ids:  # with neither, the reference reads the first token twice
        assert ours.calls == theirs.calls
    none = UnbatchedClassifierFreeGuidanceLogitsProcessor(1, ours)
    assert torch.equal(none(IDS, scores), scores.log_softmax(-1))
