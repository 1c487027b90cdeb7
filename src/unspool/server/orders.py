"""From a request's fields to an order: what the engine is asked for, and how its answer is to be written.

Nothing here knows of HTTP: batches of requests in files are read by the same functions.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from unspool.api import LanguageModel
from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.rules import find_unused
from unspool.config.structures import STRUCTURES
from unspool.config.values import LONGEST_STRING
from unspool.engine import Engine
from unspool.errors import excerpt
from unspool.grammar.call_forms import Schemas, ToolForm
from unspool.numeric import is_number
from unspool.server.fields import Found
from unspool.server.options import ClientLimits
from unspool.server.refusals import MADE_OF, ClientNames, RequestError, refuse_field
from unspool.text import Tokenizer
from unspool.text.shortest import TokenBound, find_bound
from unspool.wording import Wording

COMPLETION: Final = "cmpl-"  # the kind of a completion
COMPLETION_TOKENS: Final = 16  # OpenAI's default for completions
_SEARCHES: Final = ("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "force_words_ids")
_BIAS: Final = 1000.0  # the most that is added to a score
_LISTS: Final = ("logit_bias", "sequence_bias", "bad_words_ids", "force_words_ids", "dry_sequence_breakers")


@dataclass
class Order:
    """One request as the engine reads it: prompts of token ids, settings, and what the answer has to contain."""

    kind: str  # the beginning of its id: what a client of its route expects
    name: str  # the rest of it
    model: str
    prompts: list[list[int]]
    settings: dict[str, Any]
    names: dict[str, str]  # of settings, as the client has them
    num_choices: int = 1  # answers for each prompt
    num_drawn: int = 1  # rows of each: the best are returned, or one several times
    stream: bool = False
    sends_usage: bool = False  # in a chunk of its own at a stream's end
    repeats_usage: bool = False  # with every chunk
    logprobs: int | None = None  # likeliest tokens that the client wants to see beside the chosen one
    echo: bool = False
    writes_nothing: bool = False  # max_tokens 0: the prompt is scored, and the one token that was written is left out
    returns_ids: bool = False
    call_format: ToolForm | None = None  # of tool calls in the text
    call_schemas: Schemas = field(default_factory=dict)  # of their arguments
    most_calls: int | None = None
    shows_thoughts: bool = True  # where they are set apart from the text
    tenant: str = ""
    priority: int = 0
    pictured: dict[str, Any] | None = None  # the prompt's ids and pixels, if it has pictures
    echoed: dict[str, Any] = field(default_factory=dict)  # what a dialect repeats in its answer
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """What it is called in answers."""
        return self.kind + self.name

    @property
    def skips_specials(self) -> bool:
        """Whether special tokens are left out of texts."""
        return bool(self.settings["skip_special_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class Target:
    """What requests are read for: a model under its served name, and the bounds of what may be asked."""

    name: str
    lm: LanguageModel
    limits: ClientLimits = field(default_factory=ClientLimits)
    engine: Engine | None = None  # what runs it, if anything does

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises if it has none."""
        if self.lm.tokenizer is None:
            raise RequestError(400, f"the model {self.name!r} has no tokenizer; send token ids to /v1/completions")
        return self.lm.tokenizer

    @property
    def context(self) -> int | None:
        """The longest text that it reads."""
        found: int | None = self.lm.model.info.max_context
        return found

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens of a prompt, if there is a bound."""
        info = self.lm.model.info
        if info.is_encoder_decoder:
            found: int | None = info.longest_source
            return found
        return None if self.context is None else self.context - 1

    def encode_prompt(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """A prompt's tokens. One that can't fit is refused by its length alone: finding its tokens takes seconds."""
        longest, bound = self.longest_prompt, _find_bound(self.tokenizer)
        if longest is not None and bound is not None and len(text) * 4 > longest * bound.most_bytes:
            fewest = bound.count(text)
            if fewest > longest:
                raise self.refuse_long(field, f"{len(text)} characters, which are at least {fewest} tokens,")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_text(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """The tokens of a text that need not fit into the context."""
        most = self.limits.text_bytes
        if len(text) * 4 > most and (size := len(text.encode("utf-8", "replace"))) > most:
            raise refuse_field(
                field, f"the text has {size} bytes; at most {most} are read at once, so send parts of it"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def refuse_long(self, field: str, size: str) -> RequestError:
        """A prompt that does not fit, of such a size."""
        is_pair = self.lm.model.info.is_encoder_decoder
        ends = (
            f"its encoder takes at most {self.longest_prompt}"
            if is_pair
            else f"the model's context ends at {self.context}"
        )
        return refuse_field(field, f"the prompt has {size} and {ends}; shorten it", "context_length_exceeded")


_BOUNDS: Final = WeakKeyDictionary[Tokenizer, tuple[int, TokenBound | None]]()


def _find_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """How few tokens a text can have, found once a tokenizer; None where there is no bound."""
    size = len(tokenizer)
    known = _BOUNDS.get(tokenizer)
    if known is None or known[0] != size:
        known = _BOUNDS[tokenizer] = (size, find_bound(tokenizer.backend_tokenizer))
    return known[1]


def make_order(found: Found, prompts: list[list[int]], target: Target, kind: str) -> Order:
    """The order of a request whose prompts are known; `kind` is the beginning of its id."""
    limits = target.limits
    if len(prompts) > limits.prompts:
        raise refuse_field("prompt", f"{len(prompts)} prompts in one request; at most {limits.prompts} are taken")
    values, settings = found.values, found.settings
    values.pop("model", None)
    num_choices = settings.pop("num_return_sequences", 1)
    num_drawn = values.pop("best_of", num_choices)
    if num_drawn < num_choices:
        raise refuse_field("best_of", f"`best_of`={num_drawn} texts are written, and `n`={num_choices} of them wanted")
    if num_drawn * len(prompts) > limits.choices:
        raise refuse_field(
            "n", f"{num_drawn * len(prompts)} texts in one request; at most {limits.choices} are written"
        )
    priority = values.pop("priority", 0)
    if priority > limits.priority:
        raise refuse_field(
            "priority", f"`priority`={priority} is above what this server lets clients ask: {limits.priority}"
        )
    options = _read_stream_options(values.pop("stream_options", {}))
    shares, salt = values.pop("cache_prompt", True), values.pop("cache_salt", "")
    if len(salt) > 128:
        raise refuse_field("cache_salt", "`cache_salt` has at most 128 characters")
    salt = salt if shares else uuid.uuid4().hex
    name = values.pop("request_id", None)
    order = Order(
        kind=kind,
        name=name[:64] if name else uuid.uuid4().hex,
        model=target.name,
        prompts=prompts,
        settings=settings,
        names=found.names,
        num_choices=num_choices,
        num_drawn=num_drawn,
        stream=values.pop("stream", False),
        sends_usage=bool(options.get("include_usage")),
        repeats_usage=bool(options.get("continuous_usage_stats")),
        returns_ids=values.pop("return_token_ids", False),
        priority=priority,
        tenant=salt,
    )
    _settle(order, values, target)
    return order


def _read_stream_options(options: Any) -> dict[str, Any]:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for name, value in options.items():
        if name not in known or not isinstance(value, bool | None):
            raise refuse_field("stream_options", f"`stream_options` has {', '.join(known)}, each true or false")
    if options.get("include_obfuscation"):
        raise refuse_field("stream_options", "`include_obfuscation` is not offered; leave it out")
    return dict(options)


def _settle(order: Order, values: dict[str, Any], target: Target) -> None:
    """Turn what clients say into the library's settings, one subject after the other."""
    settings = order.settings
    _settle_stops(settings, values, target)
    _settle_words(settings, values, target)
    _settle_structure(order, values)
    _settle_search(order, values)
    for setting, sent in MADE_OF.items():
        if setting in settings and sent in order.names:
            order.names.setdefault(setting, sent)
    _settle_sampling(settings, target)
    _settle_length(order, target)
    if not settings["do_sample"] and settings.get("num_beams", target.lm.generation_config.num_beams) in (None, 1):
        order.num_drawn = 1  # all would be the same
    if order.num_drawn > 1:
        settings["num_return_sequences"] = order.num_drawn
    skips = values.pop("skip_special_tokens", True)
    negative = values.pop("negative_prompt", None)
    if values:  # a field of the table that no route reads would be accepted and ignored
        raise RuntimeError(f"fields that nothing reads: {', '.join(values)}")
    if negative is not None and "guidance_scale" not in settings:
        raise refuse_field(
            "negative_prompt",
            "`negative_prompt` is what `guidance_scale` leads away from; send one (1.5, for instance)",
        )
    if order.stream and "prompt_logprobs" in settings:
        raise refuse_field("prompt_logprobs", "`prompt_logprobs` come with a whole answer; leave out stream")
    refuse_unused(order)
    settings["skip_special_tokens"] = skips
    if negative is not None:
        settings["negative_prompt"] = negative


def refuse_unused(order: Order) -> None:
    """Raise for settings that would have no effect beside the others."""
    config = GenerationConfig()
    for name, value in order.settings.items():
        setattr(config, name, value)
    for name, reason in find_unused(config).items():
        if name in order.names:
            raise refuse_field(order.names[name], _explain_unused(order, name, reason), "without_effect")


def _explain_unused(order: Order, name: str, reason: Wording) -> str:
    """Why a setting has no effect, by what the client has sent and not by what follows from it."""
    settings, named, needed = order.settings, order.names[name], PARAMETERS[name].needs
    if needed and needed[0] == "num_beams" and "num_beams" not in order.names:
        return f"`{named}` is read by beam search alone; send `num_beams` above 1 too, or leave it out"
    if not needed or needed[0] != "do_sample" or "do_sample" in order.names:
        return reason.say(ClientNames(order.names))
    searches = [search for search in _SEARCHES if settings.get(search) not in (None, 0, 1)]
    said = " and ".join(f"`{order.names.get(search, search)}`" for search in searches) or "this request"
    never = {"use_beam_search", "penalty_alpha", "num_beam_groups", "force_words_ids"} & {*searches, *order.names}
    if never or name.startswith("mirostat"):  # a temperature would be refused too
        return f"tokens are not drawn with {said}, so `{named}` would have no effect; leave one of them out"
    return (
        f"tokens are not drawn with {said} and no `temperature`, so `{named}` would have no effect; "
        "send a `temperature` above 0, or leave it out"
    )


def _settle_stops(settings: dict[str, Any], values: dict[str, Any], target: Target) -> None:
    stops = settings.get("stop_strings")
    if isinstance(stops, list) and len(stops) > target.limits.stop_strings:
        raise refuse_field("stop", f"{len(stops)} stop strings; at most {target.limits.stop_strings} are taken")
    extra = values.pop("stop_token_ids", None)
    ignores = values.pop("ignore_eos", False)
    if extra is None and not ignores:
        return
    if "eos_token_id" in settings:
        raise refuse_field(
            "eos_token_id", "`eos_token_id` stands for all end tokens; leave out stop_token_ids and ignore_eos"
        )
    own = target.lm.generation_config.eos_token_id
    ends = [] if ignores or own is None else [own] if isinstance(own, int) else list(own)
    added = [] if extra is None else [extra] if isinstance(extra, int) else extra
    size = target.lm.model.info.vocab_size
    if any(token >= size for token in added):
        raise refuse_field("stop_token_ids", f"`stop_token_ids` are ids from 0 to {size - 1}, not {max(added)}")
    ends += added
    settings["eos_token_id"] = list(dict.fromkeys(ends)) or None


def _settle_words(settings: dict[str, Any], values: dict[str, Any], target: Target) -> None:
    """Texts that stand for tokens: forbidden, forced, biased."""
    for name in _LISTS:
        _check_count(name, values.get(name, settings.get(name)), target)
    for name, setting in (("bad_words", "bad_words_ids"), ("force_words", "force_words_ids")):
        words = values.pop(name, None)
        if words is None:
            continue
        if setting in settings:
            raise refuse_field(name, f"`{name}` and `{setting}` are the same thing twice; give one of them")
        words = [words] if isinstance(words, str) else words
        spelled = [ids for word in words for ids in _spell(target.tokenizer, word, both=name == "bad_words")]
        settings[setting] = spelled
    allowed = values.pop("allowed_token_ids", None)
    if allowed is not None:
        size = target.lm.model.info.vocab_size
        kept = {token for token in allowed if 0 <= token < size}
        if len(kept) != len(set(allowed)):
            raise refuse_field("allowed_token_ids", f"token ids go from 0 to {size - 1}")
        others = [token for token in range(size) if token not in kept]
        settings["suppress_tokens"] = sorted({*others, *(settings.get("suppress_tokens") or ())})
    if "logit_bias" in settings:
        settings["logit_bias"] = _read_bias(settings["logit_bias"], target)
    if "dry_sequence_breakers" in settings:
        settings["dry_sequence_breakers"] = _read_breakers(settings["dry_sequence_breakers"], target)


def _check_count(name: str, given: Any, target: Target) -> None:
    """Raise for more entries than every step may look at."""
    most = target.limits.logit_bias
    if isinstance(given, list | dict) and len(given) > most:
        raise refuse_field(name, f"`{name}` has {len(given)} entries; at most {most} are taken")


def _spell(tokenizer: Tokenizer, word: str, *, both: bool) -> list[list[int]]:
    """A word's tokens, and those with a space before it."""
    forms = (word, f" {word}") if both and not word.startswith(" ") else (word,)
    found = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
    return [ids for ids in found if ids]


def _read_bias(given: Any, target: Target) -> dict[int, float]:
    """OpenAI's and vLLM's mapping of ids, or llama-server's list of pairs; texts stand for all of their tokens."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    made: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise refuse_field("logit_bias", "`logit_bias` is {id: number}, or a list of [id or text, number or false]")
        key, value = pair
        bias = -math.inf if value is False else value
        if not is_number(bias, allows_infinity=True) or (bias > -math.inf and abs(bias) > _BIAS):
            raise refuse_field(
                "logit_bias", f"a bias is a number from {-_BIAS} to {_BIAS}, or false, not {excerpt(value)}"
            )
        for token in _read_token(key, target):
            made[token] = made.get(token, 0.0) + float(bias)
    return made


def _read_token(key: Any, target: Target) -> list[int]:
    if isinstance(key, str) and not key.isdecimal():
        if len(key) > LONGEST_STRING:
            raise refuse_field("logit_bias", f"a text in `logit_bias` has at most {LONGEST_STRING} characters")
        return target.tokenizer.encode(key, add_special_tokens=False)
    try:
        token = int(key)
    except (TypeError, ValueError) as error:
        raise refuse_field("logit_bias", f"{excerpt(key)} is neither a token id nor a text") from error
    size = target.lm.model.info.vocab_size
    if isinstance(key, bool | float) or not 0 <= token < size:
        raise refuse_field("logit_bias", f"{excerpt(key)} is not a token id; ids go from 0 to {size - 1}")
    return [token]


def _read_breakers(given: Sequence[Any], target: Target) -> list[int]:
    made = []
    for one in given:
        if not isinstance(one, str | int) or isinstance(one, bool):
            raise refuse_field("dry_sequence_breakers", "`dry_sequence_breakers` are token ids or texts")
        ids = [one] if isinstance(one, int) else target.tokenizer.encode(one, add_special_tokens=False)
        if len(ids) != 1:
            raise refuse_field(
                "dry_sequence_breakers", f"a breaker is one token, and {excerpt(one)} is {len(ids)}; give token ids"
            )
        made += ids
    return made


def put_format(found: Found, field: str, form: Any) -> None:
    """Enter a dialect's own `field` that says what the text must be, as the response_format that it stands for."""
    if "response_format" in found.values:
        raise refuse_field(field, f"`{field}` and `response_format` both describe what the text must be; give one")
    found.put("response_format", form)
    found.names["response_format"] = field


def _settle_structure(order: Order, values: dict[str, Any]) -> None:
    """`response_format` and `structured_outputs` as the one setting that they are."""
    settings = order.settings
    for sent, name, value in _list_structures(order.names, values):
        if has_structure(settings):
            raise refuse_field(sent, "two fields describe what the text must be; give one of them")
        settings[name] = value
        order.names[name] = sent


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")


def put_effort(found: Found, field: str, effort: Any) -> None:
    """Enter a dialect's own `field` that says how long the model thinks."""
    if effort is None:
        return
    if effort not in EFFORTS:
        raise refuse_field(field, f"an effort is one of {', '.join(EFFORTS)}, not {excerpt(effort)}", "invalid_value")
    found.put("reasoning_effort", effort)
    found.names["reasoning_effort"] = field


def _list_structures(names: Mapping[str, str], values: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """What `response_format` and `structured_outputs` ask for: the field, the setting and its value."""
    field = names.get("response_format", "response_format")
    asked = [(field, *one) for one in _read_format(field, values.pop("response_format", None))]
    return asked + [("structured_outputs", *one) for one in _read_structured(values.pop("structured_outputs", None))]


def take_structures(found: Found) -> list[tuple[str, str, Any]]:
    """All that says what the text must be, taken out of a request: the field, the setting and its value."""
    asked = _list_structures(found.names, found.values)
    for name in STRUCTURES:
        if found.settings.get(name) not in (None, False):
            asked.append((found.names.get(name, name), name, found.settings.pop(name)))
    return asked


def has_structure(settings: Mapping[str, Any]) -> bool:
    """Whether something says what the text must be."""
    return any(settings.get(name) not in (None, False) for name in STRUCTURES)


def _read_format(field: str, form: Any) -> list[tuple[str, Any]]:
    if form is None:
        return []
    kind = form.get("type")
    if kind == "text":
        return []
    if kind == "json_object":  # llama-server takes a schema here
        schema = form.get("schema")
        return [("json_schema", _check_schema(field, schema)) if schema is not None else ("json_object", True)]
    if kind == "json_schema":
        held = form.get("json_schema", form)
        schema = held.get("schema") if isinstance(held, dict) else None
        if schema is None:
            needed = "json_schema: {name, schema}" if field == "response_format" else "a schema"
            raise refuse_field(field, f"`{field}` needs {needed}")
        return [("json_schema", _check_schema(field, schema))]
    if kind == "structural_tag":
        return [("structural_tag", {name: value for name, value in form.items() if name != "type"})]
    raise refuse_field(
        field, f"`{field}` has the types text, json_object, json_schema and structural_tag, not {excerpt(kind)}"
    )


def _check_schema(field: str, schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise refuse_field(field, f"a schema is an object, not {excerpt(schema)}")
    return schema


def _read_structured(given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    known = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    known |= {"json_object": "json_object", "structural_tag": "structural_tag"}
    found = []
    for name, value in given.items():
        if value in (None, False):
            continue
        if name not in known:
            raise refuse_field(
                "structured_outputs", f"`structured_outputs` has {', '.join(known)}, not {excerpt(name)}"
            )
        found.append((known[name], value))
    return found


def _settle_search(order: Order, values: dict[str, Any]) -> None:
    settings = order.settings
    if values.pop("use_beam_search", False):
        settings["num_beams"] = max(order.num_drawn, settings.get("num_beams", 1), 2)
        settings.setdefault("do_sample", False)
    if settings.get("num_beams", 1) > 1 or settings.get("penalty_alpha"):
        order.num_drawn = max(order.num_choices, 1)  # a search returns its best
    mirostat = values.pop("mirostat", None)
    if mirostat == 1:
        raise refuse_field("mirostat", "`mirostat` 1 is not offered; use 2")
    if mirostat == 2:
        settings.setdefault("mirostat_tau", 5.0)


def _settle_sampling(settings: dict[str, Any], target: Target) -> None:
    """Whether tokens are drawn: a temperature says it; else a search, the client's or the model's own, does not, and
    everything else does."""
    temperature = settings.get("temperature")
    if temperature is not None and not 0 <= temperature <= 100:
        raise refuse_field("temperature", f"`temperature` goes from 0 to 100, not {temperature}")
    if temperature == 0:
        if settings.get("do_sample"):
            raise refuse_field(
                "temperature", "`temperature` 0 takes the likeliest token, and do_sample draws; give one"
            )
        settings["do_sample"] = False
        kept = ("seed", "top_k") if settings.get("penalty_alpha") else ("seed",)
        for name in list(settings):  # at temperature 0 every sampler leaves the likeliest token
            if name in PARAMETERS and PARAMETERS[name].group == "sampling" and name not in kept:
                del settings[name]
    model_config = target.lm.generation_config
    if "do_sample" not in settings:
        searches = any(settings.get(name, getattr(model_config, name)) not in (None, 0, 1) for name in _SEARCHES)
        asked = "do_sample" in model_config.explicit and bool(model_config.do_sample)
        settings["do_sample"] = temperature is not None or asked or not searches
    if settings["do_sample"] and "top_k" not in settings and "top_k" not in model_config.explicit:
        settings["top_k"] = 0  # the library's default of 50 is the reference's, not clients'


def _settle_length(order: Order, target: Target) -> None:
    settings, limits = order.settings, target.limits
    longest, info = max(map(len, order.prompts)), target.lm.model.info
    before = 1 if info.is_encoder_decoder else longest  # tokens that a text begins behind: an encoder reads the prompt
    room = limits.new_tokens if target.context is None else min(limits.new_tokens, target.context - before)
    asked = settings.get("max_new_tokens")
    name = order.names.get("max_new_tokens", "max_tokens")
    most = target.longest_prompt
    if most is not None and longest > most:
        field = "prompt" if order.kind == COMPLETION else order.names.get("messages", "messages")
        raise target.refuse_long(field, f"{longest} tokens")
    if asked is None:
        if "max_length" not in settings:
            settings["max_new_tokens"] = room
        elif settings["max_length"] > before + limits.new_tokens:
            raise refuse_field("max_length", f"at most {limits.new_tokens} new tokens are written for a request here")
        return
    if asked == 0:
        order.writes_nothing, settings["max_new_tokens"] = True, 1
    elif asked > limits.new_tokens:
        raise refuse_field(name, f"`{name}`={asked} is above this server's limit of {limits.new_tokens} new tokens")
    elif asked > room:
        raise refuse_field(
            name,
            f"`{name}`={asked} after {_say_before(info.is_encoder_decoder, longest)} passes the context of "
            f"{target.context} tokens; at most {room} fit",
            "context_length_exceeded",
        )


def _say_before(is_pair: bool, longest: int) -> str:
    return "the token that a text begins with" if is_pair else f"a prompt of {longest} tokens"
