"""Sounds over HTTP: a real Whisper behind the openai package."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

import unspool
from tests.server.running import RunningServer
from unspool.loading.catalogue import find_model
from unspool.server.transcriptions import write_transcription
from unspool.speech.results import Transcription


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    if find_model("whisper-tiny.en") is None:
        pytest.skip("run `unspool pull whisper-tiny.en`")
    with RunningServer({"ears": unspool.load("whisper-tiny.en")}, has_engine=False) as running:
        yield running


@pytest.fixture(scope="module")
def sound() -> bytes:
    """Two seconds of a tone, as a WAV file."""
    samples = (np.sin(np.arange(32_000) * 2 * np.pi * 440 / 16_000) * 9000).astype("<i2")
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.tobytes())
    return made.getvalue()


def test_transcriptions(server: RunningServer, sound: bytes) -> None:
    lm = server.state.models.find("ears").lm
    assert lm is not None
    expected = lm.transcribe(io.BytesIO(sound), temperature=0.0)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        file = ("a.wav", sound)
        told = client.audio.transcriptions.create(model="ears", file=file, temperature=0)
        assert told.text == expected.text
        verbose = client.audio.transcriptions.create(
            model="ears", file=file, temperature=0, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert verbose.text == expected.text and verbose.duration == pytest.approx(2.0)
        subtitles = client.audio.transcriptions.create(model="ears", file=file, temperature=0, response_format="vtt")
        assert str(subtitles).startswith("WEBVTT")
        events = list(client.audio.transcriptions.create(model="ears", file=file, temperature=0, stream=True))
        assert events[-1].type == "transcript.text.done" and events[-1].text == expected.text
        chosen = client.audio.transcriptions.create(model="ears", file=file, extra_body={"choice": '[" a tone"]'})
        assert chosen.text == "a tone"
        with pytest.raises(openai.BadRequestError, match="unknown field 'langauge'; did you mean 'language'"):
            client.audio.transcriptions.create(model="ears", file=file, extra_body={"langauge": "en"})
        for asked in ({"response_format": "xml"}, {"nonsense": "1"}, {"temperature": "hot"}, {"stream": "yes"}):
            with pytest.raises(openai.BadRequestError):
                client.audio.transcriptions.create(model="ears", file=file, extra_body=asked)
        with pytest.raises(openai.BadRequestError):
            client.audio.transcriptions.create(model="ears", file=("a.wav", b"RIFF no sound"))
        with pytest.raises(openai.BadRequestError, match="the file is a WAV file without samples"):
            client.audio.transcriptions.create(model="ears", file=("a.wav", sound[:20]))
        with pytest.raises(openai.BadRequestError, match="audio/transcriptions"):
            client.chat.completions.create(model="ears", messages=[{"role": "user", "content": "hello"}])
    assert server.post("/v1/audio/transcriptions", {"model": "ears"}).status_code == 400
    told = httpx.post(f"{server.address}/v1/audio/translations", data={"model": "ears"}, files={"file": file})
    assert told.status_code == 400 and "knows English only" in told.text


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_a_transcription_says_what_was_asked_for(server: RunningServer, task: str) -> None:
    made = write_transcription(Transcription([], "de", 1.0), "verbose_json", server.state.models.find("ears"), task)
    assert json.loads(bytes(made.body))["task"] == task
