"""Speech with a drafter: the same text as without one, in fewer passes of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unspool
from tests.conformance.cases import load_model
from tests.speech.models import WINDOW, distil, distil_decoder, draw_features, make_whisper, save_speech_model
from tests.speech.test_features import draw_sound
from tests.speech.test_generate import LONG, SHORT, STAMPS, ask_reference, assert_same
from unspool.errors import InputError, SettingError
from unspool.models.adapters.pair import AdaptedPair

SEED = 1
DRAFTERS = ("itself", "distilled", "decoder alone", "stranger", "lookup", "both")


def make_drafter(name: str, model: Any = None, seed: int = SEED) -> dict[str, Any]:
    """The arguments of a drafter for an object of transformers."""
    drafts = {
        "itself": lambda: model or make_whisper(seed),
        "distilled": lambda: distil(seed),
        "decoder alone": lambda: distil_decoder(seed),
        "stranger": lambda: make_whisper(seed + 7, encoder_layers=1, decoder_layers=1, d_model=16),
        "both": lambda: distil(seed),
    }
    found: dict[str, Any] = {"assistant_model": drafts[name](), "num_assistant_tokens": 4} if name in drafts else {}
    return found | ({"prompt_lookup_num_tokens": 3} if name in ("lookup", "both") else {})


@contextmanager
def count_calls(owner: Any, name: str) -> Iterator[list[int]]:
    """How often a method is called, as a list of one entry for each call."""
    calls, method = [], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return method(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        delattr(owner, name)


# --- the text is the same ------------------------------------------------------------------------------------


FEW = {"max_new_tokens": 12}


@pytest.mark.parametrize("drafter", ["distilled", "lookup"])
@pytest.mark.parametrize("name", [name for name in SHORT if "num_beams" not in SHORT[name]])
def test_one_window(name: str, drafter: str) -> None:
    model, features = make_whisper(SEED), draw_features(2, WINDOW, SEED)
    call = {"input_features": features, **FEW, **SHORT[name]}
    assert_same(unspool.generate(model, **call, **make_drafter(drafter)), unspool.generate(model, **call))


@pytest.mark.parametrize("drafter", ["distilled", "lookup"])
@pytest.mark.parametrize("name", [name for name in LONG if "num_beams" not in LONG[name]])
def test_windows(name: str, drafter: str) -> None:
    model, features = make_whisper(SEED), draw_features(1, 140, SEED)
    call = {"input_features": features, **FEW, **LONG[name], "return_segments": True}
    assert_same(unspool.generate(model, **call, **make_drafter(drafter)), unspool.generate(model, **call))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("native", [True, False])
def test_models_of_transformers(drafter: str, native: bool) -> None:
    model, features = make_whisper(SEED), draw_features(2, WINDOW, SEED)
    call = {"input_features": features, "return_timestamps": True, **FEW, "native": native}
    assert_same(unspool.generate(model, **call, **make_drafter(drafter)), unspool.generate(model, **call))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_of_long_sounds(drafter: str) -> None:
    model, features, ends = make_whisper(2), draw_features(3, 120, 2), [120, 70, 101]
    mask = (torch.arange(120) < torch.tensor(ends)[:, None]).long()
    call = {"input_features": features, "attention_mask": mask, "return_timestamps": True, "return_segments": True}
    call |= FEW
    call |= {"temperature": (0.0,), "logprob_threshold": -3.0, "compression_ratio_threshold": 1.2}
    assert_same(unspool.generate(model, **call, **make_drafter(drafter, seed=2)), unspool.generate(model, **call))


@pytest.mark.parametrize(
    ("drafter", "stamps"),
    [("itself", False), ("distilled", False), ("stranger", False), ("decoder alone", False), ("decoder alone", True)],
)
def test_the_reference_writes_the_same(drafter: str, stamps: bool) -> None:
    """It lets the first token be one of `begin_suppress_tokens` if there is a draft model: here there are none.

    With timestamps, the generate() of a whole Whisper that drafts for it moves the place that the rules of timestamps
    count from, and its text is another one than without a draft model.
    """
    model, features = copy.deepcopy(make_whisper(SEED)), draw_features(1, WINDOW, SEED)
    model.generation_config.begin_suppress_tokens = None
    draft = make_drafter(drafter, model)["assistant_model"]
    call = {"input_features": features, "language": "en", "return_timestamps": stamps, **FEW}
    expected = ask_reference(model, **call, assistant_model=copy.deepcopy(draft))[0].tolist()
    found = unspool.generate(model, **call, assistant_model=draft)[0].tolist()
    if drafter != "decoder alone":  # it returns the prompt too
        expected = expected[-len(found) :]
    assert found == expected


def test_objects_that_were_attached() -> None:
    model, features = copy.deepcopy(make_whisper(SEED)), draw_features(1, 140, SEED)
    expected = unspool.generate(make_whisper(SEED), input_features=features, **STAMPS, **FEW)
    unspool.attach(model)
    try:
        for drafter in ("distilled", "decoder alone"):
            found = model.generate(features, **STAMPS, **FEW, **make_drafter(drafter))
            assert found.tolist() == expected.tolist()
    finally:
        unspool.detach(model)


def test_samples_of_lookup_are_those_without_it() -> None:
    model, features = make_whisper(SEED), draw_features(2, WINDOW, SEED)
    call = {"input_features": features, **STAMPS, "temperature": (0.9,), "seed": 5}
    plain = unspool.generate(model, **call)
    assert unspool.generate(model, **call, prompt_lookup_num_tokens=4).tolist() == plain.tolist()


SURE_OF_ITSELF = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}


def test_sampling_under_a_draft_model() -> None:
    """Tokens are drawn from the model's distribution: their frequencies are those of sampling alone."""
    model, features = make_whisper(SEED), draw_features(1, WINDOW, SEED)
    call = {"input_features": features, "language": "en", "do_sample": True, "temperature": 1.5, "max_new_tokens": 4}
    call |= {"num_return_sequences": 1500, "return_dict_in_generate": True, "top_k": 6, "eos_token_id": None}
    plain = unspool.generate(model, **call, seed=1).sequences[:, 4:]
    drafted = unspool.generate(model, **call, seed=2, assistant_model=distil(SEED), **SURE_OF_ITSELF)
    size = model.config.vocab_size
    for place in (1, 2):
        one, two = (torch.bincount(row[:, place], minlength=size) / 1500 for row in (plain, drafted.sequences[:, 4:]))
        assert float((one - two).abs().max()) < 0.06  # four deviations
    assert 0 < drafted.speculation.acceptance < 1


# --- and the work is less ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    save_speech_model(folder)
    distil(SEED).save_pretrained(folder / "distilled")
    make_drafter("stranger")["assistant_model"].save_pretrained(folder / "stranger")
    for name in ("distilled", "stranger"):
        (folder / name / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> unspool.LanguageModel:
    return unspool.load(folder)


SURE: dict[str, Any] = {"temperature": 0.0, "logprob_threshold": None, "no_speech_threshold": None, **FEW}


@pytest.mark.parametrize("draft", ["itself", "distilled", "stranger"])
@pytest.mark.parametrize("stamps", [False, True, "word"])
def test_transcriptions(lm: unspool.LanguageModel, folder: Path, draft: str, stamps: bool | str) -> None:
    assistant = lm if draft == "itself" else unspool.load(folder / draft)
    sounds = [draw_sound(1.9), draw_sound(0.5, 3)]
    plain = lm.transcribe(sounds, return_timestamps=stamps, **SURE)
    found = lm.transcribe(sounds, return_timestamps=stamps, **SURE, assistant_model=assistant)
    assert [one.as_dict() for one in found] == [one.as_dict() for one in plain] and plain[0].text
    one = lm.transcribe(sounds[0], return_timestamps=stamps, **SURE, assistant_model=assistant)
    assert one.as_dict() == plain[0].as_dict()


def test_a_model_that_drafts_for_itself_is_always_right(lm: unspool.LanguageModel) -> None:
    features = draw_features(1, WINDOW, SEED)
    call = {"input_features": features, "language": "en", "max_new_tokens": 24, **SURE_OF_ITSELF}
    core = lm.model
    with count_calls(core, "encode") as encodings:
        output = unspool.generate(core, **call, assistant_model=lm, return_dict_in_generate=True)
    num_new = output.sequences.shape[1] - 4
    assert output.speculation.acceptance == 1.0 and len(encodings) == 1
    assert output.stats.forward_passes == 1 + -(-(num_new - 1) // 6)


@pytest.mark.parametrize("draft", ["distilled", "stranger"])
def test_an_encoder_that_both_have_reads_once(lm: unspool.LanguageModel, folder: Path, draft: str) -> None:
    """Each window is encoded once: for the language, for every temperature, for the times of words."""
    assistant = unspool.load(folder / draft)
    tried = {"temperature": (0.0, 0.4, 0.8), "logprob_threshold": 0.0, "return_timestamps": "word", "seed": 1}
    with count_calls(lm.model, "encode") as own, count_calls(assistant.model, "encode") as drafts:
        found = lm.transcribe(draw_sound(0.6), assistant_model=assistant, **tried)
    assert {one.temperature for one in found.segments} == {0.8}
    assert len(drafts) == (0 if draft == "distilled" else len(own)) and 1 <= len(own) <= len(found.segments)


def test_states_of_both_encoders(folder: Path, lm: unspool.LanguageModel) -> None:
    model, draft = lm.model, unspool.load(folder / "stranger").model
    features = draw_features(2, WINDOW, SEED)
    states, drafted = (one.encode(None, embeds=features).states for one in (model, draft))
    call = {"encoder_outputs": states, "language": "en", "max_new_tokens": 12, "return_dict_in_generate": True}
    plain = unspool.generate(model, **call)
    with count_calls(draft, "encode") as encodings:
        output = unspool.generate(model, **call, assistant_model=draft, assistant_encoder_outputs=drafted)
    assert output.sequences.tolist() == plain.sequences.tolist() and not encodings
    assert sum(output.speculation.drafted) > 0
    with pytest.raises(SettingError, match=r"reads the source with an encoder of its own.*assistant_encoder_outputs"):
        unspool.generate(model, **call, assistant_model=draft)
    with pytest.raises(InputError, match="1 rows and the encoder's input 2"):
        unspool.generate(model, **call, assistant_model=draft, assistant_encoder_outputs=drafted[:1])
    with pytest.raises(InputError, match=r"assistant_encoder_outputs.*width is 16"):
        unspool.generate(model, **call, assistant_model=draft, assistant_encoder_outputs=states)
    with pytest.raises(InputError, match="there is no such model here"):
        unspool.generate(model, **call, assistant_encoder_outputs=drafted)
    alike = unspool.load(folder / "distilled")
    assert unspool.generate(model, **call, assistant_model=alike).sequences.tolist() == plain.sequences.tolist()


# --- what can't be -------------------------------------------------------------------------------------------


def make_other(**sizes: int) -> Any:
    return make_whisper(3, **sizes)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another vocabulary": (lambda: make_other(vocab_size=100), {}, r"another tokenizer.*\(100 and 92 tokens\)"),
    "text, decoder": (lambda: load_model("llama").model, {}, "reads text and the model reads sound"),
    "text, pair": (lambda: load_model("t5").model, {}, "reads text and the model reads sound"),
    "other features": (lambda: make_other(num_mel_bins=8), {}, r"\(rows, 8, 60\) and the model \(rows, 16, 60\)"),
    "states of another width": (
        lambda: transformers.WhisperForCausalLM(
            transformers.WhisperConfig(**{**make_whisper(3).config.to_dict(), "d_model": 16})
        ),
        {},
        "reads states 16 wide, and those of the model are 32",
    ),
    "beams": (lambda: make_whisper(SEED), {"num_beams": 2}, "`num_beams`=2 does not go with a drafter"),
    "no model": (object, {}, "is not a model that unspool knows"),
    "a short context": (
        lambda: make_other(max_target_positions=20),
        {"condition_on_prev_tokens": True, **STAMPS},
        "may have 27 tokens.*ends at 20",
    ),
}


@pytest.mark.parametrize("windows", [{}, {"return_segments": True}], ids=["one run", "windows"])
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_is_read(
    name: str, windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings, words = REFUSED[name]
    model, features = make_whisper(SEED), draw_features(1, WINDOW, SEED)
    read: list[Any] = []
    monkeypatch.setattr(AdaptedPair, "encode", lambda *given, **_: read.append(given))
    with pytest.raises(SettingError, match=words):
        unspool.generate(model, input_features=features, assistant_model=make(), **settings, **windows, native=False)
    assert not read


def test_a_model_of_text_has_no_use_for_a_model_of_sound() -> None:
    model = load_model("t5").model
    with pytest.raises(SettingError, match="reads sound and the model reads text"):
        unspool.generate(model, torch.tensor([[5, 6]]), assistant_model=make_whisper(SEED), max_new_tokens=3)
