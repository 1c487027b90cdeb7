"""`/v1/audio/transcriptions` and `/v1/audio/translations`: a sound in, its text out."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, Final, TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from unspool.api import LanguageModel
from unspool.config import PARAMETERS
from unspool.errors import SettingError, excerpt
from unspool.server.bodies import JsonResponse, get_record, read_body, until_gone
from unspool.server.frames import frame
from unspool.server.lifecycle import Gate
from unspool.server.models import Served
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.sse import EventStream
from unspool.server.state import ServerState
from unspool.speech.results import Segment, Transcription
from unspool.speech.sound import Sound, open_stream
from unspool.speech.writing import write_srt, write_vtt
from unspool.wording import suggest

T = TypeVar("T")

FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_NOT_OFFERED: Final = ("chunking_strategy", "include", "known_speaker_names", "known_speaker_references", "keywords")
_LONGEST: Final = 16_384  # characters of a field


class AudioRoutes:
    """The endpoints, over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._ears: dict[str, Ear] = {}  # of each model

    async def transcribe(self, request: Request) -> Response:
        """What is said, in its own language."""
        return await self._answer(request, "transcribe")

    async def translate(self, request: Request) -> Response:
        """What is said, in English."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: str) -> Response:
        state, record = self._state, get_record(request)
        with ExitStack() as stack:
            stack.enter_context(state.gate.enter(record.key))
            sound, fields = await self._read_form(request)
            served = await state.models.borrow(fields.pop("model", [None])[0])
            stack.callback(state.models.give_back, served)
            record.model = served.name
            lm = served.lm
            assert lm is not None
            if lm.model.info.features is None:
                raise RequestError(400, f"{served.name} reads text, not sound; choose a model of speech", param="model")
            if task == "translate" and getattr(lm.generation_config, "is_multilingual", None) is False:
                raise RequestError(
                    400,
                    f"{served.name} knows English only, and translates nothing; use /v1/audio/transcriptions",
                    param="model",
                )
            form, streams, settings = read_fields(fields, task)
            ear = self._ears.setdefault(served.name, Ear())
            try:
                if streams:
                    events = _stream(ear, partial(_segments, lm, sound, settings), state.gate)
                    kept = stack.pop_all()
                    return EventStream(events, kept.close, ping_seconds=state.options.ping_seconds)
                found = await until_gone(request, ear.transcribe(partial(_transcribe, lm, sound, settings)))
            except Exception as error:
                raise read_error(error) from error
            return write_transcription(found, form, served, task)

    async def _read_form(self, request: Request) -> tuple[bytes, dict[str, list[str]]]:
        """The sound and the fields of a form."""
        limits = self._state.options.limits
        raw = await read_body(request, limits.audio_bytes, limits.body_seconds)
        sent = False

        async def replay() -> dict[str, Any]:
            nonlocal sent
            body, sent = (b"" if sent else raw), True
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            form = await Request(request.scope, replay).form(max_files=1, max_fields=64, max_part_size=len(raw) + 1)
        except Exception as error:  # whatever a hostile content type or body makes of the library below
            raise RequestError(400, "the body is not a form with a file (multipart/form-data)") from error
        fields: dict[str, list[str]] = {}
        sound: bytes | None = None
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise refuse_field(name[:64], "the sound is the field 'file'")
                sound = await value.read()
            elif len(value) > _LONGEST:
                raise refuse_field(name[:64], f"a field has at most {_LONGEST} characters")
            else:
                fields.setdefault(name.removesuffix("[]"), []).append(value)
        await form.close()
        if not sound:
            raise refuse_field("file", "the form has no file, or an empty one", "missing_required_parameter")
        return sound, fields


def read_fields(fields: dict[str, list[str]], task: str) -> tuple[str, bool, dict[str, Any]]:
    """The answer's format, whether it streams, and the settings of a transcription."""
    settings: dict[str, Any] = {"task": task}
    form, streams, asks_times = "json", False, False
    for name, values in fields.items():
        value = values[-1]
        if not value:
            continue
        if name == "response_format":
            form = value
        elif name == "stream":
            if value.lower() not in ("true", "false"):
                raise refuse_field(name, f"`stream` is true or false, not {excerpt(value)}")
            streams = value.lower() == "true"
        elif name == "timestamp_granularities":
            if not set(values) <= {"word", "segment"}:
                raise refuse_field(name, "`timestamp_granularities` are word and segment")
            asks_times = True
            settings["return_timestamps"] = "word" if "word" in values else True
        elif name in ("language", "prompt"):
            settings[name] = value
        elif name in _NOT_OFFERED:
            raise refuse_field(name, f"`{name}` is not offered; leave it out", "unsupported_parameter")
        elif name in PARAMETERS or name == "temperature":
            settings[name] = _read_setting(name, value)
        else:
            known = ("response_format", "stream", "timestamp_granularities", "language", "prompt", "temperature")
            hint = suggest(name, (*known, *PARAMETERS))
            raise refuse_field(name[:64], f"unknown field {excerpt(name)}{hint}", "unknown_parameter")
    if form not in FORMATS:
        raise refuse_field("response_format", f"`response_format` is one of {', '.join(FORMATS)}, not {excerpt(form)}")
    if asks_times and form != "verbose_json":
        raise refuse_field("timestamp_granularities", "times are in the response_format verbose_json alone")
    if streams and form not in ("json", "text"):
        raise refuse_field("stream", "a stream is text; leave out response_format")
    return form, streams, settings


def _read_setting(name: str, text: str) -> Any:
    try:
        return PARAMETERS[name].parse(text)
    except SettingError as error:
        raise refuse_field(name, str(error), "invalid_value") from error


def _transcribe(lm: LanguageModel, sound: bytes, settings: dict[str, Any]) -> Transcription:
    transcription: Transcription = lm.transcribe(_open(sound), **settings)
    return transcription


def _segments(lm: LanguageModel, sound: bytes, settings: dict[str, Any]) -> Iterator[Segment]:
    yield from lm.stream_segments(_open(sound), **settings)


def _open(sound: bytes) -> Sound:
    """A sound, which errors call by its field."""
    return open_stream(io.BytesIO(sound), name="the file")


async def _stream(ear: Ear, open_segments: Callable[[], Iterator[Segment]], gate: Gate) -> AsyncIterator[bytes]:
    """Events with the text as it is heard."""
    texts: list[str] = []
    try:
        async with aclosing(ear.stream(open_segments)) as segments:
            async for segment in segments:
                text = segment.text if texts else segment.text.lstrip()
                texts.append(text)
                yield frame({"type": "transcript.text.delta", "delta": text})
                if gate.is_ended:
                    raise RequestError(503, "the server was ended; send it again", code="ended")
        yield frame({"type": "transcript.text.done", "text": "".join(texts).strip()})
    except Exception as error:
        yield frame({"type": "error", **read_error(error).as_openai()})


class Ear:
    """Where a model hears one sound at a time: in a thread of its own, so that those that wait hold no other's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "unspool-sounds")
        self._turn = asyncio.Lock()

    async def transcribe(self, work: Callable[[], T]) -> T:
        """The result of hearing a sound."""
        async with self._turn:
            return await self._do(work)

    async def stream(self, open_segments: Callable[[], Iterator[T]]) -> AsyncGenerator[T]:
        """The segments of a sound as they are heard."""
        async with self._turn:
            segments = open_segments()
            while (segment := await self._do(partial(next, segments, None))) is not None:
                yield segment

    async def _do(self, work: Callable[[], T]) -> T:
        """Run in the thread; one who is cancelled keeps the turn until the thread is done with what it began."""
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait({doing})
            raise


def write_transcription(transcription: Transcription, form: str, served: Served, task: str) -> Response:
    """A transcription in the format that was asked for."""
    usage = {"type": "duration", "seconds": max(1, round(transcription.duration))}
    if form == "text":
        return PlainTextResponse(transcription.text + "\n")
    if form in ("srt", "vtt"):
        text = (write_srt if form == "srt" else write_vtt)(transcription)
        return PlainTextResponse(text, media_type="text/vtt" if form == "vtt" else "text/plain")
    if form == "json":
        return JsonResponse({"text": transcription.text, "usage": usage})
    words = [word for segment in transcription.segments for word in segment.words or ()]
    made: dict[str, Any] = {
        "task": task,
        "language": transcription.language or "en",
        "duration": transcription.duration,
        "text": transcription.text,
        "segments": [_write_segment(place, segment) for place, segment in enumerate(transcription.segments)],
        "usage": usage,
        "model": served.name,
    }
    if words:
        made["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
    return JsonResponse(made)


def _write_segment(place: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": place,
        "seek": 0,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature or 0.0,
        "avg_logprob": segment.avg_logprob or 0.0,
        "compression_ratio": segment.compression_ratio or 0.0,
        "no_speech_prob": segment.no_speech_prob or 0.0,
    }
