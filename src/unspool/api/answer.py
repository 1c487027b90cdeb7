"""One call of the short way: a run, and the text of its rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from unspool.api.again import describe_call, keep_run, start_again
from unspool.api.opening import read_config
from unspool.api.pictured import read_pictured
from unspool.api.prefix import Prefix, make_conversation
from unspool.api.prompt import OMITTED, PROMPT_NAMES, as_ids, read_encoding, refuse_chat
from unspool.api.speaker import Piece, Speaker
from unspool.api.starting import start
from unspool.config.sampling import asks_for_draws
from unspool.config.structures import STRUCTURES
from unspool.decoding.loop import Emitted
from unspool.decoding.run import Run
from unspool.errors import ContextError, InputError, SettingError, UnsupportedError, name_row
from unspool.grammar.generic_tools import GENERIC, is_silent
from unspool.grammar.reading import find_readers
from unspool.grammar.tools import CallFormat, make_settings, try_format
from unspool.grammar.vocabulary import list_specials
from unspool.outputs import Generation, Stats, TokenLogprob, ToolCall
from unspool.text import Detokenizer, StopText, Tokenizer

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
        self._lm = lm
        if lm.model.info.features is None:  # a temperature of speech is tried where another one failed
            settings = _imply_draws(settings)
        negative = settings.pop("negative_prompt", None)
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
        self.run: Run = self._start(arguments, settings)
        self._added = list(self.run.added_texts)
        tokenizer, stops = lm.tokenizer, self._list_stop_strings()
        rows = range(self.run.num_rows)
        self._text: list[list[str]] = [[] for _ in rows]
        self._decoders = (
            None if tokenizer is None else [Detokenizer(tokenizer, skip_special_tokens=skip_special) for _ in rows]
        )
        self._trimmers = (
            [StopText(stops, keep=bool(self.run.parts.settings.keep_stop_strings)) for _ in rows] if stops else None
        )
        self._waiting: dict[int, tuple[list[int], list[TokenLogprob]]] = {}  # tokens whose text is not certain yet

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
    ) -> CallFormat | None:
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
            text = self._write(row, tokens, is_last=reason is not None)
            if text or reason is not None or self._decoders is None:
                del waiting[row]
                yield Piece(text, row, ids, reason, logprobs)

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

    def _write(self, row: int, tokens: Sequence[int], *, is_last: bool) -> str:
        if self._decoders is None:
            return ""
        text = self._decoders[row].put(tokens) + (self._decoders[row].end() if is_last else "")
        return self._enter(row, text, is_last=is_last)

    def _enter(self, row: int, text: str, *, is_last: bool) -> str:
        """Add text to a row's; returns what of it is certain."""
        text, self._added[row] = self._added[row] + text, ""  # a healed prompt has grown past the caller's
        if self._trimmers is not None:
            text = self._trimmers[row].put(text) + (self._trimmers[row].end() if is_last else "")
        self._text[row].append(text)
        return text

    def _read_calls(self) -> list[list[ToolCall]] | None:
        if self._calls is None or self._lm.tokenizer is None:
            return None
        return [self._calls.read_calls(self._lm.tokenizer.decode(ids)) for ids in self.run.emitted]

    def result(self) -> Generation:
        """Texts, tokens and costs."""
        run = self.run
        prompts = self._prompt_ids or run.parts.prompts.list_tokens()
        return Generation(
            texts=["".join(parts) for parts in self._text],
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
        )
