"""`unspool.compress_prompt`: what stays, how much of it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import unspool
from tests.compression.cases import GOLDENS
from unspool import compress_prompt
from unspool.compression.losses import measure_texts

PIER = "The pier of Lisbon was built in 1843, and every ledger of the harbour says so again and again. "
BREAD = "It took 91 days to find the compass that Stefan guarded near the old bridge of York. "


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / "llama", device="cpu")


@pytest.mark.parametrize("rate", [0.1, 0.33, 0.5, 0.9])
def test_the_rate_is_kept_and_the_rest_is_the_text_own(lm: unspool.LanguageModel, rate: float) -> None:
    text = PIER * 3
    made = compress_prompt(lm, text, rate=rate, window=20)
    kept = [token for token in made.tokens if token.is_kept]
    assert len(kept) == round(rate * len(made.tokens))
    assert "".join(token.text for token in made.tokens) == text
    assert "".join(token.text for token in kept) == made.contexts[0] == made.text


def test_all_stays_at_a_rate_of_one(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, [PIER, BREAD], "Answer.", "Who?", rate=1)
    assert made.text == f"Answer.\n\n{PIER}\n\n{BREAD}\n\nWho?"
    assert made.rate == 1


def test_tokens_stay_by_their_own_losses(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, PIER, rate=0.5, window=4096)
    ids = lm.encode(PIER)[0]
    (losses,) = measure_texts(lm.model, [ids])
    assert [token.loss for token in made.tokens] == pytest.approx(losses.tolist(), abs=1e-4)
    least = min(token.loss for token in made.tokens if token.is_kept and token.loss is not None)
    assert all(token.loss <= least for token in made.tokens if not token.is_kept and token.loss is not None)


def test_a_question_counts_by_what_it_makes_likelier(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, PIER, question="When?", rate=0.5, window=4096)
    bare = lm.tokenizer.encode(PIER, add_special_tokens=False)
    asked = lm.encode("When?\n\n")[0]
    plain, given = measure_texts(lm.model, [[asked[0], *bare], [*asked, *bare]])
    expected = plain[-len(bare) :] - given[-len(bare) :]
    assert [token.loss for token in made.tokens] == pytest.approx(expected.tolist(), abs=1e-4)


def test_later_windows_are_read_after_what_is_left(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, PIER * 3, rate=0.5, window=16)
    ids = lm.tokenizer.encode(PIER * 3, add_special_tokens=False)
    left = [token for token, one in zip(ids[:32], made.tokens[:32], strict=True) if one.is_kept]
    (losses,) = measure_texts(lm.model, [[*lm.encode("a")[0][:1], *left, *ids[32:48]]])
    assert [token.loss for token in made.tokens[32:48]] == pytest.approx(losses[-16:].tolist(), abs=1e-4)


def test_contexts_that_say_least_go_first(lm: unspool.LanguageModel) -> None:
    texts = [PIER, BREAD, PIER.upper(), BREAD * 2]
    made = compress_prompt(lm, texts, question="When was the pier built?", rate=0.2)
    gone = [place for place, text in enumerate(made.contexts) if not text]
    assert gone and len(gone) < len(texts)
    assert all(token.loss is None and not token.is_kept for token in made.tokens if token.context in gone)
    whole = compress_prompt(lm, texts, rate=0.2, rank_contexts=False)
    assert all(whole.contexts)


def test_a_target_is_kept(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, [PIER, BREAD], "Say when.", "When?", target_token=40)
    counted = [token for token in made.tokens if token.is_kept]
    assert made.text.startswith("Say when.\n\n") and made.text.endswith("\n\nWhen?")
    assert len(counted) <= 40


def test_what_must_stay_stays(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, PIER * 2, rate=0.1, keep=["ledger"], keep_digits=True)
    assert made.text.count("ledger") == 2
    assert made.text.count("1843") == 2


def test_characters_of_several_tokens_stay_whole(lm: unspool.LanguageModel) -> None:
    text = "日本語のテキスト🙂 und Çocuklar bahçede 🙂🙂 oynuyordu"
    for rate in (0.2, 0.5, 0.8):
        made = compress_prompt(lm, text, rate=rate, window=8)
        assert "\ufffd" not in made.text
        rest = iter(text)
        assert all(letter in rest for letter in made.text)  # letters of the text, in its order


def test_progress_ends_with_all_tokens(lm: unspool.LanguageModel) -> None:
    seen: list[tuple[int, int]] = []
    made = compress_prompt(lm, PIER, rate=0.5, window=8, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(made.tokens), len(made.tokens))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": 1.01}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "0.5"}, "rate"),
        ({"target_token": 5000}, "target_token"),
        ({"target_token": 2, "question": "When was it built?"}, "target_token"),
        ({"window": 1}, "window"),
        ({"keep": [""]}, "keep"),
        ({"context": ""}, "context"),
        ({"context": [PIER, ""]}, "context"),
        ({"context": [3]}, "context"),
        ({"question": None}, "question"),
        ({"progress": 3}, "progress"),
    ],
)
def test_bad_input_is_refused(lm: unspool.LanguageModel, given: dict[str, object], told: str) -> None:
    with pytest.raises(unspool.UnspoolError, match=told):
        compress_prompt(lm, **{"context": PIER, **given})


def test_prompts_beyond_the_positions_are_refused() -> None:
    lm = unspool.load(GOLDENS / "models" / "llama", device="cpu")
    lm.model.info = type(lm.model.info)(**{**vars(lm.model.info), "max_context": 40, "ends_at_context": True})
    with pytest.raises(unspool.ContextError, match="40"):
        compress_prompt(lm, PIER * 9, rate=0.9)


def test_numbers_are_finite(lm: unspool.LanguageModel) -> None:
    made = compress_prompt(lm, PIER, rate=0.5)
    assert all(token.loss is None or np.isfinite(token.loss) for token in made.tokens)
