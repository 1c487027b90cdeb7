"""Every processor, made for four rows, beside the reference's where it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers as reference

import unspool
from unspool.logits import LogitsProcessor, LogitsProcessorList

INF = float("inf")
ROWS, VOCAB, WIDTH = 4, 40, 16
WHISPER = SimpleNamespace(no_timestamps_token_id=19, eos_token_id=12, bos_token_id=12, max_initial_timestamp_index=6)
ENCODER_IDS = torch.randint(0, 12, (ROWS, 9), generator=torch.Generator().manual_seed(7))
UNIFORMS = torch.tensor([0.1, 0.7, 0.3, 0.9], dtype=torch.float64)
BIAS: dict[tuple[int, ...], float] = {(3,): 2.0, (4, 5): -1.5, (5, 5): 3.0, (1, 2, 3): 4.0, (7,): -INF, (4, 3): 1.0}


def random_scores(seed: int, rows: int = ROWS, vocab: int = VOCAB, ties: bool = False) -> torch.Tensor:
    """Scores as a model gives them; whole numbers, so that many tie, if asked."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return scores.round() if ties else scores


def random_ids(seed: int, rows: int = ROWS, width: int = WIDTH, vocab: int = 6) -> torch.Tensor:
    """A history over few tokens, so that it repeats itself."""
    return torch.randint(0, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Pair:
    """A processor for four rows, the reference's of the same name, and arguments they take beside the two."""

    make: Callable[[], LogitsProcessor]
    theirs: Callable[[], Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    equals_bits: bool = True  # the reference's result to the last bit, or but for rounding


def _same(name: str, *args: Any, equals_bits: bool = True, **kwargs: Any) -> Pair:
    return Pair(
        lambda: getattr(unspool, name)(*args, **kwargs),
        lambda: getattr(reference, name, None)(*args, **kwargs),
        equals_bits=equals_bits,
    )


def _ours(name: str, *args: Any, **kwargs: Any) -> Pair:
    extra = {"uniforms": UNIFORMS} if name.startswith("XTC") else {}
    return Pair(lambda: getattr(unspool, name)(*args, **kwargs), extra=extra)


def _allow(row: int, ids: torch.Tensor) -> list[int]:
    return [row, int(ids[-1]) + 1, 20, 21]


PAIRS: dict[str, Pair] = {
    "temperature": _same("TemperatureLogitsWarper", 0.7),
    "top_k": _same("TopKLogitsWarper", 7),
    "top_p": _same("TopPLogitsWarper", 0.8),
    "min_p": _same("MinPLogitsWarper", 0.1),
    "min_p_keeps_three": _same("MinPLogitsWarper", 0.9, min_tokens_to_keep=3),
    "typical": _same("TypicalLogitsWarper", 0.6),
    "typical_keeps_five": _same("TypicalLogitsWarper", 0.05, min_tokens_to_keep=5),
    "epsilon": _same("EpsilonLogitsWarper", 0.02),
    "epsilon_keeps_five": _same("EpsilonLogitsWarper", 0.6, min_tokens_to_keep=5),
    "eta": _same("EtaLogitsWarper", 0.05),
    "eta_keeps_two": _same("EtaLogitsWarper", 0.9, min_tokens_to_keep=2),
    "repetition": _same("RepetitionPenaltyLogitsProcessor", 1.3),
    "repetition_without_prompt": _same("RepetitionPenaltyLogitsProcessor", 0.7, prompt_ignore_length=10),
    "encoder_repetition": _same("EncoderRepetitionPenaltyLogitsProcessor", 1.4, ENCODER_IDS),
    "no_repeat_1": _same("NoRepeatNGramLogitsProcessor", 1),
    "no_repeat_2": _same("NoRepeatNGramLogitsProcessor", 2),
    "no_repeat_3": _same("NoRepeatNGramLogitsProcessor", 3),
    "no_repeat_10": _same("NoRepeatNGramLogitsProcessor", 10),
    "encoder_no_repeat_1": _same("EncoderNoRepeatNGramLogitsProcessor", 1, ENCODER_IDS),
    "encoder_no_repeat_2": _same("EncoderNoRepeatNGramLogitsProcessor", 2, ENCODER_IDS),
    "sequence_bias": _same("SequenceBiasLogitsProcessor", BIAS),
    "bad_words": _same("NoBadWordsLogitsProcessor", [[3], [4, 5], [1, 2, 0], [2]], [2]),
    "prefix": _same("PrefixConstrainedLogitsProcessor", _allow, 1),
    "min_length": _same("MinLengthLogitsProcessor", WIDTH + 2, [2, 9]),
    "min_length_reached": _same("MinLengthLogitsProcessor", WIDTH, 2),
    "min_new_tokens": _same("MinNewTokensLengthLogitsProcessor", 10, 8, [2, 9]),
    "decay": _same("ExponentialDecayLengthPenalty", (3, 1.2), [2, 9], 8),
    "forced_bos": _same("ForcedBOSTokenLogitsProcessor", 5),
    "forced_eos": _same("ForcedEOSTokenLogitsProcessor", WIDTH + 1, [2, 9]),
    "suppress": _same("SuppressTokensLogitsProcessor", [1, 30, 7]),
    "suppress_at_begin": _same("SuppressTokensAtBeginLogitsProcessor", [1, 30, 7], WIDTH),
    "inf_nan": _same("InfNanRemoveLogitsProcessor"),
    "normalise": _same("LogitNormalization"),
    "codebooks": _same("AlternatingCodebooksLogitsProcessor", 5, 12, 10),
    "whisper": _same("WhisperTimeStampLogitsProcessor", WHISPER, begin_index=3),
    "whisper_by_rules_alone": _same("WhisperTimeStampLogitsProcessor", WHISPER, 3, False),
    "top_h": Pair(
        lambda: unspool.TopHLogitsWarper(0.4),
        lambda: reference.generation.logits_process.TopHLogitsWarper(0.4),
    ),
    "presence": _ours("PresencePenaltyLogitsProcessor", 0.7),
    "frequency": _ours("FrequencyPenaltyLogitsProcessor", 0.3),
    "frequency_without_prompt": _ours("FrequencyPenaltyLogitsProcessor", 0.3, prompt_ignore_length=6),
    "logit_bias": _ours("LogitBiasLogitsProcessor", {3: 1.5, 4: -INF}),
    "dry": _ours("DRYLogitsProcessor", 0.8, 1.75, 2, [4]),
    "top_a": _ours("TopALogitsWarper", 0.3),
    "top_n_sigma": _ours("TopNSigmaLogitsWarper", 1.2),
    "xtc": _ours("XTCLogitsWarper", 0.5, 0.1),
    "dynamic_temperature": _ours("DynamicTemperatureLogitsWarper", 1.0, 0.5, 1.3),
    "mirostat": _ours("MirostatLogitsWarper", 1.5, 0.1),
}

# Parameters that may be one number a row: how to make the processor with it, and four numbers, neutral ones among them.
PER_ROW: dict[str, tuple[Callable[[Any], LogitsProcessor], list[Any]]] = {
    "temperature": (unspool.TemperatureLogitsWarper, [0.3, 1.0, 2.5, 0.7]),
    "top_k": (unspool.TopKLogitsWarper, [1, 5, 40, 3]),
    "top_p": (unspool.TopPLogitsWarper, [0.0, 0.3, 0.9, 0.99]),
    "min_p": (unspool.MinPLogitsWarper, [0.0, 0.1, 0.5, 1.0]),
    "typical_p": (unspool.TypicalLogitsWarper, [0.1, 0.5, 0.9, 0.99]),
    "epsilon": (unspool.EpsilonLogitsWarper, [0.01, 0.1, 0.3, 0.9]),
    "eta": (unspool.EtaLogitsWarper, [0.01, 0.1, 0.3, 0.9]),
    "top_h": (unspool.TopHLogitsWarper, [0.1, 0.4, 0.8, 1.0]),
    "top_a": (unspool.TopALogitsWarper, [0.0, 0.2, 0.7, 1.0]),
    "top_n_sigma": (unspool.TopNSigmaLogitsWarper, [0.5, 1.0, 2.0, 3.0]),
    "repetition": (unspool.RepetitionPenaltyLogitsProcessor, [1.0, 1.5, 0.5, 3.0]),
    "presence": (unspool.PresencePenaltyLogitsProcessor, [0.0, 1.5, -0.5, 3.0]),
    "frequency": (unspool.FrequencyPenaltyLogitsProcessor, [0.0, 1.5, -0.5, 3.0]),
    "dry_multiplier": (unspool.DRYLogitsProcessor, [0.0, 0.4, 1.0, 2.0]),
    "dry_base": (lambda base: unspool.DRYLogitsProcessor(0.8, base), [1.0, 1.5, 1.75, 4.0]),
    "min_new_tokens": (
        lambda fewest: unspool.MinNewTokensLengthLogitsProcessor(10, fewest, [2, 9]),
        [0, 5, 7, 20],
    ),
    "min_length": (lambda fewest: unspool.MinLengthLogitsProcessor(fewest, 2), [0, WIDTH, WIDTH + 1, 99]),
    "mirostat_tau": (unspool.MirostatLogitsWarper, [0.5, 1.0, 2.0, 3.0]),
    "dynatemp_range": (lambda spread: unspool.DynamicTemperatureLogitsWarper(1.1, spread), [0.0, 0.2, 0.5, 1.0]),
}


def run(processor: Any, ids: torch.Tensor, scores: torch.Tensor, **extra: Any) -> torch.Tensor:
    """Call a processor as decoding does."""
    return LogitsProcessorList([processor])(ids, scores, **extra)
