"""Sound written by models of transformers: by name, in pipelines and by the program."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models.adapters.unlike import make_unlike
from tests.pretrained.voices import save_voice

import unspool
from unspool.cli.main import main
from unspool.errors import InputError, LoadError, SettingError, UnsupportedError
from unspool.speech.sound import open_sound
from unspool.speech.wav import encode_wav

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of VITS' code
PLAYED: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "guidance_scale": 2.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def find(name: str) -> Path:
        return save_voice(name, tmp_path_factory.mktemp(name))

    return find


def test_the_documents_example(folders: Any) -> None:
    """MusicGen's, with a small random codec: `ClassifierFreeGuidanceLogitsProcessor` is what guides it."""
    processor = unspool.AutoProcessor.from_pretrained(folders("musicgen"))
    model = unspool.AutoModelForTextToWaveform.from_pretrained(folders("musicgen"))
    inputs = processor(text=["eighties pop", "loud rock with drums"], padding=True, return_tensors="pt")
    sound = model.generate(**inputs, do_sample=True, guidance_scale=3, max_new_tokens=9, seed=2)
    assert sound.shape[:2] == (2, 1) and bool(sound.isfinite().all())
    theirs = transformers.MusicgenForConditionalGeneration.from_pretrained(folders("musicgen"))
    expected = theirs.generate(**inputs, **PLAYED)
    torch.testing.assert_close(model.generate(**inputs, **PLAYED), expected)


def test_every_processor_goes_with_music(folders: Any) -> None:
    model = unspool.AutoModelForTextToWaveform.from_pretrained(folders("musicgen"))
    inputs = unspool.AutoProcessor.from_pretrained(folders("musicgen"))("pop")
    seen: list[tuple[int, ...]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(scores.shape))
        return scores

    plain = model.generate(**inputs, **PLAYED)
    watched = model.generate(**inputs, **PLAYED, logits_processor=[watch], suppress_tokens=[3, 4, 5])
    assert set(seen) == {(make_unlike("musicgen").decoder.num_codebooks, 32)} and watched.shape[1] == plain.shape[1]


def test_pipelines(folders: Any) -> None:
    play = unspool.pipeline("text-to-audio", model=str(folders("musicgen")))
    sound = play("pop", generate_kwargs=PLAYED)
    inputs = unspool.AutoProcessor.from_pretrained(folders("musicgen"))("pop")
    model = unspool.AutoModelForTextToWaveform.from_pretrained(folders("musicgen"))
    assert sound["sampling_rate"] == 16_000 == play.sampling_rate
    assert np.allclose(sound["audio"], model.generate(**inputs, **PLAYED)[0].numpy())
    assert len(play(["pop", "rock"], **PLAYED)) == 2


def test_a_model_of_one_pass(folders: Any) -> None:
    say = unspool.pipeline("text-to-speech", model=str(folders("vits")))
    sound = say("hello")
    assert sound["audio"].shape[0] == 1 and sound["audio"].shape[1] > 0 and sound["sampling_rate"] == 8_000
    with pytest.raises(SettingError, match="one pass, without settings"):
        say("hello", max_new_tokens=3)


def test_spectrograms_need_a_vocoder_and_a_voice(folders: Any) -> None:
    folder, voice = folders("speecht5"), torch.linspace(-1, 1, 4)[None]
    say = unspool.pipeline("text-to-speech", model=str(folder), vocoder=str(folder / "vocoder"))
    found = say("hello", forward_params={"speaker_embeddings": voice}, maxlenratio=2.0)
    theirs = transformers.SpeechT5ForTextToSpeech.from_pretrained(folder).eval()
    vocoder = transformers.SpeechT5HifiGan.from_pretrained(folder / "vocoder").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt").input_ids
    torch.manual_seed(0)
    expected = theirs.generate_speech(ids, voice, vocoder=vocoder, maxlenratio=2.0)
    assert found["audio"].shape == (1, len(expected)) and found["sampling_rate"] == 16_000
    with pytest.raises(SettingError, match="give `speaker_embeddings`"):
        say("hello")
    with pytest.raises(SettingError, match="has no setting 'temperature'"):
        say("hello", speaker_embeddings=voice, temperature=2.0)
    with pytest.raises(SettingError, match="give a `vocoder`"):
        unspool.pipeline("text-to-speech", model=str(folder))
    with pytest.raises(SettingError, match="leave it out"):
        unspool.pipeline("text-to-speech", model=str(folders("musicgen")), vocoder=vocoder)


def test_a_model_of_several_parts(folders: Any) -> None:
    """Bark: text to meaning, meaning to coarse codes, these to fine ones, and a codec."""
    sound = unspool.pipeline("text-to-speech", model=str(folders("bark")))("hello")
    theirs = transformers.BarkModel.from_pretrained(folders("bark")).eval()
    inputs = transformers.AutoProcessor.from_pretrained(folders("bark"))("hello", return_tensors="pt")
    assert sound["audio"].shape == theirs.generate(**inputs).shape and sound["sampling_rate"] == 16_000


@pytest.mark.filterwarnings("ignore")  # of what its config says of tokens
def test_frames_of_codes(folders: Any) -> None:
    """CSM, whose own loop writes a frame of codes a step."""
    sound = unspool.pipeline("text-to-speech", model=str(folders("csm")))("hello", max_new_tokens=6)
    theirs = transformers.CsmForConditionalGeneration.from_pretrained(folders("csm")).eval()
    processor = transformers.AutoProcessor.from_pretrained(folders("csm"))
    inputs = processor("[0]hello", add_special_tokens=True, return_tensors="pt")
    expected = theirs.generate(**inputs, max_new_tokens=6, output_audio=True)
    assert sound["sampling_rate"] == 16_000
    assert np.allclose(sound["audio"][0], expected[0].flatten().numpy())


def test_what_writes_no_sound(folders: Any) -> None:
    with pytest.raises(LoadError, match="writes no sound"):
        unspool.AutoModelForTextToWaveform.from_pretrained("smollm2-135m")
    with pytest.raises(UnsupportedError, match="is no language model"):
        unspool.load(folders("musicgen"))
    with pytest.raises(InputError, match="nothing to say"):
        unspool.pipeline("text-to-audio", model=str(folders("musicgen")))("  ")


def test_wav_files() -> None:
    samples = np.stack([np.sin(np.arange(4_000) / 9), np.cos(np.arange(4_000) / 5)]).astype(np.float32)
    file = encode_wav(samples, 16_000)
    read = np.concatenate(list(open_sound(file).blocks()))
    assert len(read) == 4_000 and np.abs(read - samples.mean(0)).max() < 1e-4
    loud = np.concatenate(list(open_sound(encode_wav(np.full((1, 50), 3.0), 16_000)).blocks()))
    assert np.allclose(loud, 1.0, atol=1e-3)
    with pytest.raises(InputError, match="finite"):
        encode_wav(np.full((1, 5), np.nan), 16_000)


def test_the_program(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pop.wav"
    options = ["--model", str(folders("musicgen")), "--max-new-tokens", "9", "--do-sample", "--seed", "3"]
    assert main(["speak", "pop", "-o", str(output), *options]) == 0
    said = capsys.readouterr()
    assert "pop.wav: 0.0 s of sound" in said.err and not said.out
    assert open_sound(output).seconds == pytest.approx(48 / 16_000)
    voice = tmp_path / "voice.npy"
    np.save(voice, np.zeros(4, dtype=np.float32))
    folder = folders("speecht5")
    spoken = ["--model", str(folder), "--vocoder", str(folder / "vocoder"), "--voice", str(voice)]
    assert main(["speak", "hello", "-o", str(tmp_path / "hello.wav"), *spoken]) == 0
    assert (tmp_path / "hello.wav").read_bytes()[:4] == b"RIFF"
    np.save(voice, np.array([{}], dtype=object), allow_pickle=True)
    assert main(["speak", "hello", "-o", str(tmp_path / "other.wav"), *spoken]) == 2
    assert main(["speak", "pop", "-o", str(tmp_path / "pop.mp3"), *options]) == 2
    assert main(["speak", "pop", "-o", str(tmp_path / "none" / "pop.wav"), *options]) == 2
