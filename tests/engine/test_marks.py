"""Requests with watermarks, bad words and the like share one call of their processors, and get what they get alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.fakes import make_engine, make_lm
from unspool import GumbelWatermarkingConfig

GREEN = {"watermarking_config": {"bias": 3.0}}
SELF_SEEDED = {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash", "context_width": 4}}
OTHER_KEY = {"watermarking_config": {"bias": 3.0, "hashing_key": 77}}
SYNTHID = {"watermarking_config": {"keys": [3, 5, 8, 13], "ngram_len": 3}}
SKIPPING = {"watermarking_config": {"keys": [3, 5], "ngram_len": 4, "skip_first_ngram_calls": True}}
SHORT_MEMORY = {"watermarking_config": {"keys": [2, 9], "ngram_len": 2, "context_history_size": 3}}
GUMBEL = {"watermarking_config": GumbelWatermarkingConfig(context_width=2)}
BAD_WORDS = {"bad_words_ids": [[4], [7, 9]]}
KINDS = {
    "green": GREEN,
    "self seeded": SELF_SEEDED,
    "synthid": SYNTHID,
    "skipping": SKIPPING,
    "short memory": SHORT_MEMORY,
    "gumbel": GUMBEL,
    "bad words": BAD_WORDS,
}
PROMPTS = [[5], [4, 5, 6, 9, 5, 6], [9] * 11, [3, 4], [7, 8, 9, 10, 3, 4, 5]]


def run_together(asked: list[dict[str, Any]]) -> None:
    lm = make_lm()
    calls = [
        (prompt, {"do_sample": True, "seed": seed, "max_new_tokens": 12 + 3 * seed, **own})
        for seed, (prompt, own) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    alone = [lm.generate(prompt, **own) for prompt, own in calls]
    with make_engine(lm) as engine:
        requests = [engine.submit(prompt, **own) for prompt, own in calls]
        for request, expected in zip(requests, alone, strict=True):
            assert request.result().token_ids == expected.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_kind_are_one_chain(kind: str, chains: list[int]) -> None:
    run_together([KINDS[kind]] * len(PROMPTS))
    assert max(chains) == 1


def test_every_request_may_have_a_mark_of_its_own(chains: list[int]) -> None:
    run_together([GREEN, SYNTHID, OTHER_KEY, GUMBEL, SYNTHID])
    assert max(chains) == 1


def test_rows_with_other_bad_words_are_told_apart() -> None:
    run_together([BAD_WORDS, {"bad_words_ids": [[5], [6]]}, BAD_WORDS, {}, BAD_WORDS])


def test_a_batch_with_marks_of_its_own_stands_beside_others() -> None:
    lm = make_lm()
    marks = [GREEN["watermarking_config"], None, SYNTHID["watermarking_config"]]
    batch = (PROMPTS[:3], {"do_sample": True, "seed": 3, "max_new_tokens": 14, "watermarking_config": marks})
    single = (PROMPTS[4], {"do_sample": True, "seed": 9, "max_new_tokens": 20, **GREEN})
    alone = [lm.generate(prompt, **asked) for prompt, asked in (batch, single)]
    with make_engine(lm) as engine:
        requests = [engine.submit(prompt, **asked) for prompt, asked in (batch, single)]
        for request, expected in zip(requests, alone, strict=True):
            assert request.result().token_ids == expected.token_ids
