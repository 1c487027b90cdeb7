"""One call of the short way: a run, and the text of its rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch

from unspool.api.again import describe_call, keep_run, start_again
from unspool.api.opening import read_config
from unspool.api.pictured import read_pictured
from unspool.api.prefix import Prefix, make_conversation
from unspool.api.prompt import OMITTED, PROMPT_NAMES, as_ids, is_conversation, read_encoding, refuse_chat
from unspool.api.pruned_prompts import read_pruned, take_pruning
from unspool.api.speaker import Piece, Speaker
from unspool.api.starting import start
from unspool.config.sampling import asks_for_draws
from unspool.config.structures import STRUCTURES
from unspool.decoding.loop import Emitted
from unspool.decoding.run import Run
from unspool.errors import ContextError, InputError, SettingError, UnsupportedError, name_row
from unspool.grammar.call_forms import ToolForm
from unspool.grammar.generic_tools import GENERIC, is_silent
from unspool.grammar.reading import find_readers
from unspool.grammar.tools import find_schemas, make_settings, try_format
from unspool.grammar.vocabulary import list_specials
from unspool.outputs import Generation, Stats, TokenLogprob, ToolCall
from unspool.text import Detokenizer, StopText, Tokenizer
from unspool.thoughts.kinds import find_kind
from unspool.thoughts.parts import Kind, PartText, Phase, find_said
from unspool.thoughts.places import require_marks

FRIENDLY_DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 256, "strict_constraints": True}

_OWN_FUNCTIONS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def _imply_draws(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, which draw if one of sampling is among them and nothing says whether to."""
    config = read_config(settings.get("generation_config"))
    stated = {} if config is None else {name: getattr(config, name) for name in config.explicit}
    asked = {**stated, **settings}
    return {**settings, "do_sample": True} if asks_for_draws(asked) else settings


class Answer:
    """One call of the short way: a run, and the text of its rows."""

    def __init__(self, lm: Speaker, prompt: Any, settings: dict[str, Any]) -> None:
        chat, tools = settings.pop("chat", False), settings.pop("tools", None)
        self._calls = self._follow_tools(tools, settings.pop("tool_choice", None), settings, lm.tokenizer)
        skip_special = settings.pop("skip_special_tokens", True)
        self._schemas = {} if self._calls is None else find_schemas(tools)
        self._lm = lm
        if lm.model.info.features is None:  # a temperature of speech is tried where another one failed
            settings = _imply_draws(settings)
        negative = settings.pop("negative_prompt", None)
        pruning = take_pruning(settings)
        if is_conversation(prompt, chat=chat):
            settings = self._imply_thoughts(settings)
        prefix: Prefix | None = settings.pop("prefix", None)
        pictured = read_pictured(lm, prompt, settings.pop("images", None), chat=chat, tools=tools)
        self._owner: Any = lm if pictured is None else pictured.owner
        if pictured is not None:
            self._check_alone(prefix, settings)
        if prefix is not None:
            prompt, settings = self._follow_prefix(prefix, prompt, settings, chat, tools)
            chat, tools = False, None
        if pictured is not None:
            self._prompt_ids, arguments = pictured.rows, pictured.arguments
        else:
            self._prompt_ids, arguments = self._read_prompt(prompt, settings, chat, tools)
        if negative is not None:
            arguments |= self._read_negative(negative, settings, chat, tools)
        self.run: Run = self._start(dict(arguments), settings)  # if keys are let go: to check all settings first
        if pruning is not None:
            short, cache = read_pruned(lm, self._require_rows(), pruning)
            settings |= {"past_key_values": cache, "owns_cache": True}
            self.run = self._start(self._fill(short), settings)
        self._added = list(self.run.added_texts)
        tokenizer, stops = lm.tokenizer, self._list_stop_strings()
        rows = range(self.run.num_rows)
        self._parts: list[list[tuple[Kind, str]]] = [[] for _ in rows]
        self._marks = require_marks("thoughts", tokenizer) if self.run.parts.settings.thoughts else None
        self._splitters = None if self._marks is None else [PartText(self._marks.kind, one) for one in self._phases]
        keeps = () if self._marks is None else self._marks.special_ids
        self._decoders = (
            None
            if tokenizer is None
            else [Detokenizer(tokenizer, skip_special_tokens=skip_special, keeps=keeps) for _ in rows]
        )
        self._trimmers = (
            [StopText(stops, keep=bool(self.run.parts.settings.keep_stop_strings)) for _ in rows] if stops else None
        )
        self._waiting: dict[int, tuple[list[int], list[TokenLogprob]]] = {}  # tokens whose text is not certain yet

    def _imply_thoughts(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of a chat, whose thoughts are set apart if its template has them and nothing says otherwise."""
        given = (read_config(settings.get("generation_config")), self._lm.generation_config)
        is_said = settings.get("thoughts") is not None or any(
            config is not None and "thoughts" in config.explicit for config in given
        )
        return settings if is_said or find_kind(self._lm.tokenizer) is None else {**settings, "thoughts": True}

    @cached_property
    def _phases(self) -> list[Phase]:
        """Where each row's prompt leaves its text, if thoughts are set apart."""
        if self._marks is None:
            return []
        prompts = self._prompt_ids or self.run.parts.prompts.list_tokens()
        copies = self.run.num_rows // len(prompts)
        return [phase for prompt in prompts for phase in [self._marks.find_phase(prompt)] * copies]

    def _list_stop_strings(self) -> list[str]:
        stops = self.run.parts.settings.stop_strings
        return [stops] if isinstance(stops, str) else list(stops or [])

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("a running answer can't be copied or pickled; use what result() returns")

    def _start(self, arguments: dict[str, Any], settings: dict[str, Any]) -> Run:
        lm, rows = self._lm, self._prompt_ids
        key = None
        if rows and "input_ids" in arguments and "attention_mask" not in arguments:  # none of the ids is padding
            ids = arguments["input_ids"]
            if len(arguments) == 1:
                key = describe_call(lm.model, lm.tokenizer, settings, len(rows))
                again = start_again(key, lm.model, lm.tokenizer, ids, rows, settings)
                if again is not None:
                    return again
            arguments["attention_mask"] = torch.ones_like(ids)
        try:
            run = start(
                self._owner,
                defaults=FRIENDLY_DEFAULTS,
                hides_padding=bool(rows),
                shows_rows_alone=any(settings.get(name) is not None for name in _OWN_FUNCTIONS),
                **arguments,
                **settings,
            )
        except ContextError as error:
            if len(rows) < 2:
                raise
            raise name_row(error, max(range(len(rows)), key=lambda row: len(rows[row]))) from error
        keep_run(key, lm.model, run)
        return run

    @staticmethod
    def _check_alone(prefix: Prefix | None, settings: Mapping[str, Any]) -> None:
        """Raise for what can't stand beside a prompt with pictures."""
        beside = "prefix" if prefix is not None else next((name for name in PROMPT_NAMES if name in settings), None)
        if beside is None and settings.get("past_key_values") is not None:
            beside = "past_key_values"
        if beside is not None:
            raise SettingError(f"`{beside}` and a prompt with pictures are two prompts; give one of them")

    @staticmethod
    def _follow_tools(
        tools: Any, choice: Any, settings: dict[str, Any], tokenizer: Tokenizer | None
    ) -> ToolForm | None:
        """The format of tool calls, if there are tools; a `tool_choice` adds the setting that keeps to it."""
        if tools is None or tokenizer is None:
            if choice is not None:
                raise SettingError("`tool_choice` chooses among tools, and there are none; pass tools=[…]")
            return None
        form = GENERIC if is_silent(tokenizer) else try_format(tokenizer, tools)
        if choice is None:
            return form
        for name, value in make_settings(tools, choice, tokenizer, list_specials(tokenizer), form=form).items():
            if any(settings.get(other) is not None for other in STRUCTURES):
                raise SettingError("`tool_choice` describes the text, and so does another setting; give one of them")
            settings[name] = value
        return form

    def _follow_prefix(
        self, prefix: Prefix, prompt: Any, settings: dict[str, Any], chat: bool, tools: Any
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """The whole prompts' tokens, and the settings with a cache that holds their beginning."""
        if not isinstance(prefix, Prefix):
            raise SettingError(f"`prefix` is what lm.prefix(…) returns, not a {type(prefix).__name__}")
        if settings.get("past_key_values") is not None:
            raise SettingError("`prefix` and past_key_values are two beginnings; give one of them")
        if prompt is None or prompt is OMITTED or isinstance(prompt, Mapping):
            raise SettingError(
                "what follows a `prefix` is text, messages or a list of token ids; give one as the prompt"
            )
        rows = prefix.encode(prompt, chat=chat, tools=tools)
        return rows, {**settings, "past_key_values": prefix.lend(self._lm, rows), "owns_cache": len(rows) > 1}

    def _require_rows(self) -> list[list[int]]:
        if not self._prompt_ids:
            raise InputError("keys are let go of prompts that are texts, messages or token ids; give one of them")
        return self._prompt_ids

    def as_conversation(self) -> Prefix | None:
        """What the model has read, for a next turn with the same beginning; None if rows have left the cache."""
        held = self.run.cache.find_held(self.run.emitted)
        return None if held is None else make_conversation(self._lm, *held)

    def _read_prompt(
        self, prompt: Any, settings: dict[str, Any], chat: bool, tools: Any
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """The prompt's rows, if it was given as rows, and the arguments that replace it."""
        given = {name: settings.pop(name) for name in PROMPT_NAMES if name in settings}
        given = {name: value for name, value in given.items() if value is not None}
        if prompt is None or prompt is OMITTED:
            refuse_chat(chat, tools)
            if prompt is None and not given.keys() - {"attention_mask"}:
                raise InputError(
                    "the prompt is None; give a text, messages or token ids, or leave it out to begin with the token "
                    "that begins texts"
                )
            return [], given
        if isinstance(prompt, torch.Tensor) and prompt.dim() in (1, 2):
            prompt = {"input_ids": prompt if prompt.dim() == 2 else prompt[None]}
            prompt |= {"attention_mask": given.pop("attention_mask")} if "attention_mask" in given else {}
        if given:
            raise SettingError(
                f"`{next(iter(given))}` and a prompt were given; an attention_mask goes with a tensor of ids, "
                "and the others stand for a prompt themselves"
            )
        if isinstance(prompt, Mapping):
            refuse_chat(chat, tools)
            rows, arguments = read_encoding(prompt)
        else:
            rows, arguments = self._lm.encode(prompt, chat=chat, tools=tools), {}
        if not rows:
            return [], arguments
        if not all(rows):
            raise InputError(f"prompt {[len(row) for row in rows].index(0)} is empty: there is nothing to continue")
        return rows, arguments | self._fill(rows)

    def _read_negative(self, negative: Any, settings: Mapping[str, Any], chat: bool, tools: Any) -> dict[str, Any]:
        """The arguments of a negative prompt: texts, chats or ids, read as the prompt is."""
        if settings.get("negative_prompt_ids") is not None:
            raise SettingError("`negative_prompt` and `negative_prompt_ids` are the same thing twice; give one of them")
        if negative == "" and self._lm.model.info.is_encoder_decoder:
            return {}  # which is what guidance leads away from without one
        rows = self._lm.encode(negative, chat=chat, tools=tools)
        if not all(rows):
            raise InputError("a negative prompt is empty; give at least one token, or leave it out")
        return {f"negative_prompt_{name.removeprefix('input_')}": ids for name, ids in self._fill(rows).items()}

    def _fill(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        pad = self._lm.generation_config.pad_token_id
        filler = pad if pad is not None and pad >= 0 else 0  # never read
        is_right = self._lm.model.info.is_encoder_decoder
        longest = max(len(row) for row in rows)
        if min(len(row) for row in rows) == longest:
            return {"input_ids": as_ids(rows)}
        ids, mask = [], []
        for row in rows:
            fill = longest - len(row)
            ids.append(row + [filler] * fill if is_right else [filler] * fill + row)
            mask.append([1] * len(row) + [0] * fill if is_right else [0] * fill + [1] * len(row))
        return {"input_ids": as_ids(ids), "attention_mask": torch.tensor(mask)}

    def pieces(self) -> Generator[Piece, None, None]:
        """Every row's text as it becomes certain."""
        for emitted in self.run:
            yield from self.write(emitted)

    def write(self, emitted: Emitted) -> Iterator[Piece]:
        """The text that becomes certain with what a turn added."""
        waiting = self._waiting
        if emitted.beams is not None:
            yield Piece("", beams=emitted.beams)
        for row, tokens in emitted.tokens.items():
            ids, logprobs = waiting.setdefault(row, ([], []))
            ids += tokens
            logprobs += emitted.logprobs.get(row, [])
            reason = emitted.finished.get(row)
            parts = self._write(row, tokens, is_last=reason is not None)
            if not parts and (reason is not None or self._decoders is None):
                parts = [(self._find_open(row), "")]
            if parts:
                del waiting[row]
                for kind, text in parts[:-1]:
                    yield Piece(text, row, kind=kind)
                kind, text = parts[-1]
                yield Piece(text, row, ids, reason, logprobs, kind=kind)

    def _find_open(self, row: int) -> Kind:
        """The kind of a row's last part."""
        return self._parts[row][-1][0] if self._parts[row] else "text"

    @property
    def stats(self) -> Stats:
        """The cost so far."""
        return self.run.stats

    @property
    def num_rows(self) -> int:
        """How many texts are written."""
        return self.run.num_rows

    def run_through(self) -> None:
        """Run to the end. Nobody reads the text meanwhile, so each row's is made at once, when all are written."""
        for _ in self.run:
            pass
        self.read_back()

    def read_back(self) -> None:
        """Write the text of a run that is over."""
        if self._decoders is not None:
            for row, tokens in enumerate(self.run.emitted):
                self._enter(row, self._decoders[row].read(tokens), is_last=True)

    def _write(self, row: int, tokens: Sequence[int], *, is_last: bool) -> list[tuple[Kind, str]]:
        if self._decoders is None:
            return []
        text = self._decoders[row].put(tokens) + (self._decoders[row].end() if is_last else "")
        return self._enter(row, text, is_last=is_last)

    def _enter(self, row: int, text: str, *, is_last: bool) -> list[tuple[Kind, str]]:
        """Add text to a row's; returns what of it is certain, part by part."""
        text, self._added[row] = self._added[row] + text, ""  # a healed prompt has grown past the caller's
        if self._trimmers is not None:
            text = self._trimmers[row].put(text) + (self._trimmers[row].end() if is_last else "")
        if self._splitters is None:
            parts: list[tuple[Kind, str]] = [("text", text)] if text else []
        else:
            parts = self._splitters[row].put(text) + (self._splitters[row].end() if is_last else [])
        self._parts[row] += parts
        return parts

    def _join(self, row: int, kind: Kind) -> str:
        return "".join(text for one, text in self._parts[row] if one == kind)

    def count_thinking(self, row: int) -> int:
        """Tokens of a row's thoughts so far, with those of the marks behind them."""
        if self._marks is None:
            return 0
        start = self._marks.start(self._phases[row])
        return self._marks.follow(start, self.run.emitted[row]).num

    def _read_calls(self) -> list[list[ToolCall]] | None:
        if self._calls is None or self._lm.tokenizer is None:
            return None
        texts = [self._lm.tokenizer.decode(ids) for ids in self.run.emitted]
        if self._marks is not None:  # what is thought of calls makes none
            texts = [find_said(text, self._marks.kind, phase) for text, phase in zip(texts, self._phases, strict=True)]
        return [self._calls.read_calls(text, self._schemas) for text in texts]

    def result(self) -> Generation:
        """Texts, tokens and costs."""
        run = self.run
        prompts = self._prompt_ids or run.parts.prompts.list_tokens()
        rows = range(run.num_rows)
        return Generation(
            texts=[self._join(row, "text") for row in rows],
            token_ids=run.emitted,
            prompt_token_ids=prompts,
            finish_reasons=run.finish_reasons(),
            stats=run.stats,
            logprobs=run.logprobs if run.parts.record.num_top is not None else None,
            prompt_logprobs=run.prompt_logprobs,
            beam_trace=run.beam_trace,
            dola_layers=run.dola_layers,
            output=run.output() if run.parts.returns_output else None,
            readers=find_readers(run.parts.settings, run.num_rows),
            calls=self._read_calls(),
            thoughts=None if self._marks is None else [self._join(row, "thought") for row in rows],
            num_thinking_tokens=None if self._marks is None else [self.count_thinking(row) for row in rows],
        )
