"""What the reference's processors were called with, and what ours are checked on: names, arguments, arrays."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

ROWS, LENGTH, VOCAB = 3, 12, 23


@dataclass(frozen=True)
class Case:
    """A processor and the lengths that it is called at."""

    name: str
    given: dict[str, Any]
    lengths: tuple[int, ...] = (8,)

    @property
    def key(self) -> str:
        """The case's name in the recording."""
        shown = ",".join(f"{name}={value}" for name, value in self.given.items() if name != "model_config")
        return f"{self.name}({shown})"


def make_arrays(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids with repeated n-grams and bad words among them, and scores with ties, zeros and -inf."""
    rng = np.random.default_rng(sum(map(ord, name)))
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    ids[0] = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 0]
    ids[1] = [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
    scores = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    scores[1, 3:7] = 2.5  # ties
    scores[2, :4] = -np.inf
    scores[0, 5] = 0.0
    if "Whisper" in name:
        ids[0, 4:] = [3, 20, 20, 4, 21, 5, 5, 21]
        ids[1, 4:] = [20, 20, 20, 20, 21, 21, 20, 3]
        scores[:, 19:] += np.array([[-9], [6], [1]], dtype=np.float32)
    return ids, scores


BOTH: list[Case] = [
    Case("TemperatureLogitsWarper", {"temperature": 0.7}),
    Case("TemperatureLogitsWarper", {"temperature": 2.0}),
    *(Case("TopKLogitsWarper", {"top_k": k}) for k in (1, 5, 100)),
    Case("TopKLogitsWarper", {"top_k": 2, "filter_value": -7.0, "min_tokens_to_keep": 4}),
    *(Case("TopPLogitsWarper", {"top_p": p}) for p in (0.0, 0.3, 0.8, 1.0)),
    Case("TopPLogitsWarper", {"top_p": 0.1, "filter_value": -50.0, "min_tokens_to_keep": 3}),
    Case("MinLengthLogitsProcessor", {"min_length": 7, "eos_token_id": 4}, (1, 6, 7, 8)),
    Case("MinLengthLogitsProcessor", {"min_length": 0, "eos_token_id": 0}, (1,)),
    Case("ForcedBOSTokenLogitsProcessor", {"bos_token_id": 5}, (1, 2)),
    Case("ForcedBOSTokenLogitsProcessor", {"bos_token_id": 0}, (1,)),
    Case("ForcedBOSTokenLogitsProcessor", {"bos_token_id": VOCAB - 1}, (1,)),
    Case("ForcedEOSTokenLogitsProcessor", {"max_length": 9, "eos_token_id": 2}, (7, 8, 9)),
    Case("SuppressTokensLogitsProcessor", {"suppress_tokens": [0, 3, 22]}),
    Case("SuppressTokensAtBeginLogitsProcessor", {"begin_suppress_tokens": [1, 9], "begin_index": 3}, (2, 3, 4)),
    Case("ForceTokensLogitsProcessor", {"force_token_map": [[1, 4], [3, 0], [4, None]]}, (0, 1, 2, 3, 4, 5, 9)),
]
TF: list[Case] = [
    *(Case("RepetitionPenaltyLogitsProcessor", {"penalty": p}, (1, 8, 12)) for p in (1.3, 0.5)),
    *(Case("NoRepeatNGramLogitsProcessor", {"ngram_size": n}, (1, 2, 7, 11, 12)) for n in (1, 2, 3, 4)),
    Case("NoBadWordsLogitsProcessor", {"bad_words_ids": [[4], [3, 5], [2, 3, 9], [7] * 5 + [1]], "eos_token_id": 4},
         (7, 11)),
    Case("NoBadWordsLogitsProcessor", {"bad_words_ids": [[0], [22]], "eos_token_id": 1}, (1, 5)),
]  # fmt: skip
FLAX: list[Case] = [
    Case(
        "WhisperTimeStampLogitsProcessor",
        {
            "generate_config": SimpleNamespace(
                eos_token_id=15,
                no_timestamps_token_id=18,
                is_multilingual=is_multilingual,
                max_initial_timestamp_index=first,
            ),
            "model_config": SimpleNamespace(vocab_size=VOCAB),
            "decoder_input_length": 2,
        },
        (3, 4, 5, 6, 7, 8, 9, 10, 12),
    )
    for is_multilingual in (False, True)
    for first in (1, None)
]
CASES = {
    "TF": [Case(f"TF{one.name}", one.given, one.lengths) for one in (*BOTH, *TF)],
    "Flax": [Case(f"Flax{one.name}", one.given, one.lengths) for one in (*BOTH, *FLAX)],
}
