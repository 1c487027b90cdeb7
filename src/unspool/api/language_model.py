"""The short way: a model with its tokenizer, text in and text out."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from numbers import Integral
from operator import countOf
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from unspool.api.answer import Answer
from unspool.api.background import ThreadedSteps
from unspool.api.calls import feed
from unspool.api.opening import read_config
from unspool.api.prefix import Prefix, load_prefix, read_prefix
from unspool.api.prompt import OMITTED, refuse_chat
from unspool.api.rows_apart import join_rows, part_rows, stream_rows
from unspool.api.speaker import Piece
from unspool.api.speech import needs_windows
from unspool.api.transcribe import Progress, Transcriber, generate_windows, open_sounds, split_options, transcribe
from unspool.callbacks import check_callback, check_streamer
from unspool.config import GenerationConfig
from unspool.config.values import MOST_ROWS
from unspool.errors import InputError, SettingError, name_row
from unspool.grammar.generic_tools import is_silent, write_tools
from unspool.kernels.presence import refuse_forked
from unspool.loading.catalogue import DEFAULT_MODEL
from unspool.loading.model import LoadedParts, load_parts
from unspool.models.adapters.whole import WholeObject
from unspool.models.counting import describe_weights
from unspool.models.placement import DeviceRequest, read_device_request
from unspool.outputs import Generation
from unspool.speech.results import Segment
from unspool.text import Tokenizer
from unspool.thoughts.histories import place_thoughts
from unspool.trace import Trace, Tracer, check_traced, follow

Prompt = Any
"""A text, a list of texts, a chat (list of messages), a list of chats, token ids, or a tensor of them."""


class LanguageModel:
    """A model, its tokenizer and its generation settings."""

    def __init__(self, parts: LoadedParts) -> None:
        self.name = parts.name
        if isinstance(parts.model, WholeObject):
            raise parts.model.refuse(parts.name)
        self.model = parts.model
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.model.generation_config = parts.generation_config
        self.source = parts.location
        self.pictures = parts.pictures  # what reads pictures, if the model does

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings; change them to change every later call."""
        config: GenerationConfig | None = self.model.generation_config
        return config if config is not None else GenerationConfig()

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.model.generation_config = read_config(config)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.model.info.family}, {describe_weights(self.model)}, {self.device})"

    # --- copies and other processes ----------------------------------------------------------------------
    def __copy__(self) -> Self:
        """A language model with generation settings of its own; weights and tokenizer are the same."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, model=copy.copy(self.model))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A language model with weights, tokenizer and settings of its own."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> tuple[Callable[..., LanguageModel], tuple[Any, ...]]:
        """A pickle (as for a spawned process) contains where to load the model from, and its settings."""
        return _restore, (type(self), self.model, self.tokenizer, self.name, self.source, self.pictures)

    def start(self, prompt: Prompt = OMITTED, **settings: Any) -> Answer:
        """Check a call and prepare its answer: iterate `pieces()`, then ask for `result()`."""
        refuse_forked(self.device)
        return Answer(self, prompt, settings)

    # --- text out ------------------------------------------------------------------------------------
    def generate(self, prompt: Prompt = OMITTED, *, streamer: Any = None, **settings: Any) -> Generation:
        """Continue prompts and return their texts; by default at most 256 new tokens."""
        check_streamer(streamer)
        if self.model.info.features is not None and needs_windows(self.model, prompt, settings):
            return generate_windows(self, prompt, settings, streamer)
        parts = part_rows(prompt, settings)
        if parts is not None:
            if streamer is not None:
                raise SettingError(
                    "a streamer takes one token of each row a step, and these rows are calls of their own"
                )
            begun = [self.start(part.prompts, **part.settings) for part in parts]  # all are checked first
            for each in begun:
                each.run_through()
            return join_rows(parts, [each.result() for each in begun])
        answer = self.start(prompt, **settings)
        if streamer is not None:
            feed(streamer, answer.run)
            answer.read_back()
        else:
            answer.run_through()
        return answer.result()

    def stream(self, prompt: Prompt = OMITTED, **settings: Any) -> Generator[Piece, None, None]:
        """The text as it is written; the pieces of a batch's rows come interleaved (`piece.row` is the row)."""
        parts = part_rows(prompt, settings)
        if parts is not None:
            return stream_rows(parts, self.stream)
        answer = self.start(prompt, **settings)
        if answer.run.parts.settings.return_beam_trace:
            raise SettingError(
                "`return_beam_trace` is known only at the end, and a stream can't return it: use lm.generate(), or "
                "answer = lm.start(…) with answer.pieces() and answer.result().beam_trace"
            )
        return answer.pieces()

    async def astream(self, prompt: Prompt = OMITTED, **settings: Any) -> AsyncIterator[Piece]:
        """`stream` for asynchronous programs: the work runs in a thread, and stops when the iterator is closed."""
        steps = ThreadedSteps(self.stream(prompt, **settings))
        loop, step = asyncio.get_running_loop(), None
        try:
            while True:
                # Not a task: a loop that shuts down cancels those, while their threads run on.
                step = loop.run_in_executor(None, contextvars.copy_context().run, steps.step)
                piece = await asyncio.shield(step)
                if piece is None:
                    return
                yield piece
        finally:
            steps.close()
            if step is not None and not step.done():
                await asyncio.wait([step])  # the work has stopped when closing returns

    def trace(self, prompt: Prompt = OMITTED, **settings: Any) -> Generator[dict[str, Any], None, None]:
        """What decoding one prompt does, as events (dicts of plain values): docs/trace.md describes them.

        The tokens are those of `generate` with the same settings. `prefix_ids` are tokens that count as written
        already, after which it goes on. Closing the generator stops the work.
        """
        tracer = Tracer()
        check_traced(settings)
        answer = self.start(prompt, observer=tracer, **settings)
        return follow(Trace(answer, tracer, model=self.name))

    # --- speech ------------------------------------------------------------------------------------------
    def transcribe(
        self,
        audio: Any,
        *,
        language: str | Sequence[str] | None = None,
        task: str = "transcribe",
        return_timestamps: bool | str = False,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Any:
        """The text of a sound (`Transcription`), or of each of a list: paths, arrays, or mappings of array and rate.

        `return_timestamps="word"` also finds each word's times. `language` is found from the sound unless it is given;
        `task="translate"` writes English. Further arguments: `prompt`, `temperature` (one, or several to fall back to),
        `compression_ratio_threshold`, `logprob_threshold`, `no_speech_threshold`, `condition_on_prev_tokens`,
        `batch_size`, `sampling_rate` (of arrays), and the settings of generate().
        """
        options, rest = split_options(settings, language=language, task=task, return_timestamps=return_timestamps)
        return transcribe(self, audio, options, rest, progress)

    def stream_segments(
        self, audio: Any, *, progress: Progress | None = None, **settings: Any
    ) -> Generator[Segment, None, None]:
        """The segments of a transcription as they are written, also from a stream; arguments as in `transcribe`."""
        options, rest = split_options(settings)
        sounds, _ = open_sounds(audio, options.sampling_rate)
        return Transcriber(self, sounds, options, rest, progress).segments()

    # --- beginnings that calls share -------------------------------------------------------------------
    def prefix(self, prompt: Prompt, *, chat: bool = False, tools: Any = None, **settings: Any) -> Prefix:
        """Read a beginning once (a text, messages, token ids): `lm.generate(…, prefix=it)` goes on after it.

        With `chat` a text is the system message. `cache_implementation` and `cache_config` say how it is kept.
        """
        return read_prefix(self, prompt, chat=chat, tools=tools, settings=settings)

    def load_prefix(self, path: str | Path) -> Prefix:
        """Read a prefix that `Prefix.save` wrote with this model."""
        if not isinstance(path, str | PathLike):
            raise InputError(f"a prefix is read from a file: give its path, not a {type(path).__name__}")
        return load_prefix(self, path)

    # --- prompts in ------------------------------------------------------------------------------------
    def encode(self, prompt: Prompt, *, chat: bool = False, tools: Any = None) -> list[list[int]]:
        """Token ids of a prompt, one list per row: texts, chats or ids."""
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            return [self._encode_text(prompt, chat, tools)]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError(f"a prompt is text, messages or token ids, not a {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InputError("the prompt is an empty list; give a text, messages or token ids")
        if isinstance(prompt[0], Integral | Mapping):
            return [self._encode_row(prompt, chat, tools)]
        if len(prompt) > MOST_ROWS:
            raise InputError(f"{len(prompt)} prompts in one call; at most {MOST_ROWS} are taken")
        rows = []
        for item in prompt:
            try:
                rows.append(self._encode_row(item, chat, tools))
            except InputError as error:
                if len(prompt) > 1:
                    raise name_row(error, len(rows)) from error
                raise
        return rows

    def _encode_row(self, prompt: Prompt, chat: bool, tools: Any) -> list[int]:
        """Token ids of one text, one chat, or one row of ids."""
        if isinstance(prompt, str):
            return self._encode_text(prompt, chat, tools)
        items = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        if not isinstance(items, Sequence) or isinstance(items, bytes):
            raise InputError(f"a prompt is text, messages or token ids, not a {type(items).__name__}")
        if len(items) == 0:
            raise InputError("a prompt is an empty list: there is nothing to continue. Give at least one token")
        if countOf(map(type, items), int) == len(items):
            refuse_chat(chat, tools)
            return list(items)
        kinds = set(map(type, items))  # a few, however many items there are
        if all(issubclass(kind, Mapping) for kind in kinds):
            return self._encode_chat(items, tools)
        if all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds):
            refuse_chat(chat, tools)
            return [int(item) for item in items]
        names = ", ".join(sorted({kind.__name__ for kind in kinds}))
        raise InputError(f"a prompt is text, a list of messages or a list of token ids, not a list of {names}")

    def _encode_text(self, text: str, chat: bool, tools: Any) -> list[int]:
        if chat:
            return self._encode_chat([{"role": "user", "content": text}], tools)
        if tools is not None:
            raise SettingError("tools go with a chat; give messages, or add chat=True")
        if not text:
            raise InputError("the prompt is empty: there is nothing to continue. Give at least one character")
        return self._require_tokenizer("a text prompt").encode(text)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        tokenizer = self._require_tokenizer("a chat")
        messages = place_thoughts(messages, tokenizer.chat_template)
        if tools and is_silent(tokenizer) and all(isinstance(one, Mapping) for one in tools):
            messages, tools = write_tools(messages, tools), None  # the template would leave them out
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, return_dict=False))

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{what} needs a tokenizer, and {self.name} came without one; pass token ids")
        return self.tokenizer


def _restore(
    kind: type[LanguageModel], model: Any, tokenizer: Tokenizer | None, name: str, source: Path, pictures: Any = None
) -> LanguageModel:
    return kind(LoadedParts(name, source, model, tokenizer, model.generation_config, pictures))


def read_quantize(quantize: str | None, load_in_8bit: bool, load_in_4bit: bool) -> str | None:
    """Our `quantize` from it and the reference's two switches; raises if they disagree."""
    quantize = None if quantize == "none" else quantize  # as the program's --quantize says it
    asked = [kind for kind, is_on in (("int8", load_in_8bit), ("int4", load_in_4bit)) if is_on]
    if not asked:
        return quantize
    if len(asked) > 1 or quantize not in ("auto", asked[0]):
        raise SettingError(
            f"load_in_8bit={load_in_8bit}, load_in_4bit={load_in_4bit} and quantize={quantize!r} ask for different "
            "things; give one of them"
        )
    return asked[0]


def read_devices(
    device: str | torch.device | None, device_map: Any, max_memory: Any
) -> tuple[str | torch.device | None, DeviceRequest | None]:
    """One device, or what asks for several."""
    if device is not None and (device_map is not None or max_memory is not None):
        other = "device_map" if device_map is not None else "max_memory"
        raise SettingError(f"`{other}` and `device` both say where the weights go; give one")
    asked = read_device_request(device_map, max_memory)
    if isinstance(asked, DeviceRequest):
        return None, asked
    return device if asked is None else asked, None


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = "auto",
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    threads: int | None = None,
    compile: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    native: bool | None = None,
    device_map: Any = None,
    max_memory: Any = None,
) -> LanguageModel:
    """Load a model: a folder in the Hugging Face layout, a GGUF file, a hub id, or a short name.

    `device` defaults to the GPU if there is one; `dtype` to float32 on a CPU and to the file's own on a GPU.
    `quantize="int8"` or `"int4"` keeps matrices as blocks of whole numbers (`load_in_8bit=True` and `load_in_4bit=True`
    mean the same), `"nf4"` and `"fp4"` as the codes that bitsandbytes makes (`"nf4-double"`: with its double
    quantisation), on a GPU `"fp8"` as floats of 8 bits; a GGUF's own blocks are kept as they are unless
    `quantize=None` or a dtype asks for plain numbers.
    `device_map` lays a decoder's layers over several devices ("auto", "balanced", "sequential", or parts' names and
    devices), and `max_memory` says how much each may take ({0: "10GiB", "cpu": "30GiB"}).
    `threads` bounds the CPU's threads. `compile=True` runs steps through torch.compile in every later call, if
    there is nothing faster for them. `progress(what, done, total)` is called while weights are read. A folder whose
    architecture has no native model runs through transformers; `native=False` has any folder do so, `native=True` none.
    """
    check_callback("progress", progress, "what, done, total")
    if not isinstance(compile, bool):
        raise SettingError(f"compile={compile!r:.40} is neither True nor False; a call takes a compile_config")
    quantize = read_quantize(quantize, load_in_8bit, load_in_4bit)
    device, devices = read_devices(device, device_map, max_memory)
    lm = LanguageModel(
        load_parts(
            name,
            device=device,
            devices=devices,
            dtype=dtype,
            quantize=quantize,
            threads=threads,
            revision=revision,
            offline=offline,
            progress=progress,
            native=native,
        )
    )
    if compile:
        lm.generation_config.compile = True
    return lm
