"""One call, made by transformers' own `generate` and by ours: natively, over an object, and by an object's forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import unspool
from tests.fuzz import texts
from tests.fuzz.beside import models
from tests.fuzz.beside.calls import SAMPLING, Call, make_inputs
from tests.fuzz.beside.newer import MIXED
from tests.fuzz.beside.turns import DRAFTS, continue_text, stop_at_strings
from unspool.errors import SettingError, UnspoolError

WAYS = ("native", "object", "adapter")
SEED = 1234
OVERRIDDEN = {"max_new_tokens": 3, "repetition_penalty": 1.7, "top_k": 7, "eos_token_id": 5}
DRAFTERS = ("assistant_model", "assistant_tokenizer", *DRAFTS)


@dataclass
class Answer:
    """What a way gave: an output or an error, and what a streamer was told."""

    output: Any = None
    error: BaseException | None = None
    streamed: list[Any] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        """Whether an error is one of unspool's own."""
        return isinstance(self.error, UnspoolError)

    @property
    def sequences(self) -> torch.Tensor:
        """The token ids."""
        found: torch.Tensor = self.output if isinstance(self.output, torch.Tensor) else self.output["sequences"]
        return found


class Recorder(transformers.generation.streamers.BaseStreamer):
    """A streamer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        """A prompt, a token, or with a drafter several, which transformers puts as a row of one: (1, tokens)."""
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        """The end."""
        self.told.append("end")


class Progress:
    """What a call says of the frames that it has read; one that reads a window again and again is ended."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __call__(self, frames: torch.Tensor) -> None:
        if frames.tolist() in self.told[-1:]:
            raise RuntimeError("a window is read for ever")
        self.told.append(frames.tolist())


def add_bias(token: int) -> Any:
    """A processor of a caller's own."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, token] += 2.0 + 0.1 * input_ids.shape[1]
        return scores

    return process


def stop_at(tokens: list[int]) -> Any:
    """A criterion of a caller's own: the row ends with one of the tokens."""

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(tokens, device=input_ids.device))

    return criterion


def make_arguments(call: Call, model: Any, assistant: Any) -> tuple[dict[str, Any], Recorder | Progress]:
    """The keyword arguments of a call, and what is told on its way."""
    given = {**call.settings, **make_inputs(call, model)}
    told: Recorder | Progress = Progress() if call.sounds else Recorder()
    if call.sounds:
        given["monitor_progress"] = told
    elif "streamer" in call.extras:
        given["streamer"] = told
    if "states" in call.extras:
        source = {name: given.pop(name) for name in ("input_ids", "inputs", "attention_mask") if name in given}
        if "inputs" in source:
            source["input_ids"] = source.pop("inputs")
        given |= {name: mask for name, mask in source.items() if name == "attention_mask"}
        given["encoder_outputs"] = models.make(call.model, call.seed).get_encoder()(**source)
    if "begun" in call.extras:
        given["decoder_input_ids"] = torch.tensor(call.extras["begun"], device=models.DEVICE)
    if "room" in call.extras:
        given |= make_room(call, model)
    if "allowed" in call.extras:
        allowed = call.extras["allowed"]
        given["prefix_allowed_tokens_fn"] = lambda row, ids: allowed[(row + int(ids.sum())) % len(allowed)]
    if "processor" in call.extras:
        given["logits_processor"] = transformers.LogitsProcessorList([add_bias(call.extras["processor"])])
    for name, values in call.extras.get("their processors", ()):
        made = getattr(transformers, name)(*values)
        given["logits_processor"] = transformers.LogitsProcessorList([*given.get("logits_processor", ()), made])
    if "criterion" in call.extras:
        given["stopping_criteria"] = transformers.StoppingCriteriaList([stop_at(call.extras["criterion"])])
    if "longest" in call.extras:
        longest = transformers.MaxLengthCriteria(call.extras["longest"])
        given["stopping_criteria"] = transformers.StoppingCriteriaList([*given.get("stopping_criteria", ()), longest])
    if "negative" in call.extras:
        given |= make_negative(call.extras["negative"])
    if "assistant" in call.extras:
        given["assistant_model"] = assistant
    if "constraints" in call.extras:
        given["constraints"] = [make_constraint(word) for word in call.extras["constraints"]]
    is_translated = call.extras.get("assistant") == "another's text"
    is_object = isinstance(model, transformers.PreTrainedModel)
    make_tokenizer = texts.make_reference_tokenizer if is_object else texts.make_tokenizer
    if is_translated or "stop_strings" in call.settings:
        given["tokenizer"] = make_tokenizer(models.VOCAB)
    if is_translated:
        given["assistant_tokenizer"] = make_tokenizer(models.VOCAB, order=1)
    if isinstance(mark := given.get("watermarking_config"), dict):
        kind = "SynthIDTextWatermarkingConfig" if "keys" in mark else "WatermarkingConfig"
        given["watermarking_config"] = getattr(transformers, kind)(**mark)
    if "config" in call.extras:
        take_config(call, given, model)
    return given, told


def make_negative(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Negative prompts, padded on the left to the longest; a mask where there is padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[models.PAD] * (longest - len(row)) + row for row in rows], device=models.DEVICE)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=models.DEVICE)
    is_even = all(len(row) == longest for row in rows)
    return {"negative_prompt_ids": ids} | ({} if is_even else {"negative_prompt_attention_mask": mask})


def make_constraint(word: list[Any]) -> unspool.Constraint:
    """A word that must be written, or one of several."""
    return unspool.PhrasalConstraint(word) if isinstance(word[0], int) else unspool.DisjunctiveConstraint(word)


def make_room(call: Call, model: Any) -> dict[str, Any]:
    """A static cache with room for both turns: an object's is transformers', whose windows keep less."""
    room = call.extras["room"]
    if not isinstance(model, transformers.PreTrainedModel):
        return {"cache_implementation": "static", "cache_config": {"max_cache_len": room}}
    config = model.config.get_text_config(decoder=True)
    own = transformers.StaticCache(config=config, max_cache_len=room)
    if not call.is_pair:
        return {"past_key_values": own}
    source = transformers.StaticCache(config=config, max_cache_len=len(call.ids[0]))
    return {"past_key_values": transformers.EncoderDecoderCache(own, source)}


def take_config(call: Call, given: dict[str, Any], model: Any) -> None:
    """Move the settings into a config of the model's library; those that the call names stay, and differ there."""
    kind = transformers if isinstance(model, transformers.PreTrainedModel) else unspool
    # What the second turn of a call leaves out stays in the call.
    stays = (*DRAFTS, "stop_strings", *(name for name in call.settings if name.startswith("cache_")))
    moved = [name for name in call.settings if name in given and name not in stays]
    told = {name: given.pop(name) for name in moved}
    for name in call.extras["config"]:
        given[name], told[name] = told[name], OVERRIDDEN[name]
    given["generation_config"] = kind.GenerationConfig(**told)


def run_ours(call: Call, way: str, model: Any = None, *, begins_anew: bool = False) -> Answer | None:
    """A call by one of `WAYS`, of another `model` if one is given; None where there is no native model.

    If it `begins_anew` a second turn reads all of the text, without the cache of the first.
    """
    other = call.seed if call.extras.get("assistant") == "itself" else call.seed + 1
    if way == "native":
        model, assistant = models.load(call.model, call.seed), models.load(call.model, other)
        if model is None:
            return None
    else:
        model = models.make_again(call.model, call.seed, call.attention) if model is None else model
        assistant = model if other == call.seed else models.make_again(call.model, other, call.attention)
    try:
        given, told = make_arguments(call, model, assistant)
    except ValueError as error:  # a config is checked when it is made, an object's by transformers
        return Answer(error=error if isinstance(error, UnspoolError) else SettingError(str(error)))
    if way != "native":
        given["native"] = way == "object"
    if call.settings.get("do_sample"):
        given["seed"] = SEED
    try:
        output = unspool.generate(model, **given)
        if "again" in call.extras:
            given = continue_text(call, given, output)
            if begins_anew:
                del given["past_key_values"]
            output = unspool.generate(model, **given)
    except Exception as error:
        return Answer(error=error)
    return Answer(bring_home(output), streamed=told.told)


def bring_home(value: Any) -> Any:
    """An output with its tensors on the CPU; caches stay where they are."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if type(value) in (tuple, list):
        return type(value)(map(bring_home, value))
    if type(value) is dict:
        return {name: bring_home(part) for name, part in value.items()}
    for name in list(value) if isinstance(value, Mapping) and models.DEVICE != "cpu" else ():
        if isinstance(value[name], torch.Tensor | tuple):
            setattr(value, name, bring_home(value[name]))
    return value


@dataclass(eq=False)  # transformers may compile what calls it, and looks it up by its hash
class Drawn:
    """Tokens that ours drew, which transformers is made to draw too."""

    tokens: torch.Tensor  # (rows, steps)
    step: int = 0
    faults: list[str] = field(default_factory=list)

    def __call__(self, probs: torch.Tensor, num_samples: int, **kwargs: Any) -> torch.Tensor:
        step, self.step = self.step, self.step + 1
        if step >= self.tokens.shape[1] or num_samples != 1 or len(probs) != len(self.tokens):
            return probs.argmax(-1, keepdim=True)
        return self.tokens[:, step : step + 1].to(probs.device)


@contextmanager
def drawing(drawn: Drawn | None) -> Iterator[None]:
    """Inside it, torch draws what it is told to."""
    own = torch.multinomial
    if drawn is not None:
        torch.multinomial = drawn
    try:
        yield
    finally:
        torch.multinomial = own


def say_one_length(call: Call) -> Call:
    """The call with one length, if it has two: both hold for ours, and transformers takes `max_new_tokens` alone."""
    if not {"max_length", "max_new_tokens"} <= call.settings.keys():
        return call
    settings = dict(call.settings)
    room = settings.pop("max_length") - (0 if call.sounds else call.num_read)
    return call.change(settings={**settings, "max_new_tokens": min(room, settings["max_new_tokens"])})


def run_theirs(call: Call, model: Any = None, ours: Answer | None = None) -> Answer:
    """A call by transformers; where tokens are drawn, with the draws of ours."""
    call = say_one_length(call)
    if call.model in MIXED:  # it begins states anew with every chunk
        call = call.change(settings={**call.settings, "prefill_chunk_size": None})
    attention = "eager" if call.settings.get("output_attentions") else call.attention
    other = call.seed if call.extras.get("assistant") == "itself" else call.seed + 1
    model = models.make(call.model, call.seed, attention) if model is None else model
    model = deepcopy(model) if call.sounds else model  # whose settings are written to
    assistant = model if other == call.seed else models.make(call.model, other, attention)
    try:
        given, told = make_arguments(call, model, assistant)
    except ValueError as error:
        return Answer(error=error)
    is_translated = call.extras.get("assistant") == "another's text"
    if "again" in call.extras or call.embeds != "none" or is_translated or call.model in MIXED:
        # Its drafts are checked as if the cache that was given held nothing, and over the ids beside embeddings; and
        # it takes refused ones out of the keys alone, not out of what an indexer keeps of them.
        given = {name: value for name, value in given.items() if name not in DRAFTERS}
    if "stop_strings" in given:
        criterion = stop_at_strings(given.pop("stop_strings"))
        given["stopping_criteria"] = transformers.StoppingCriteriaList([*given.get("stopping_criteria", []), criterion])
    given.pop("tokenizer", None)
    drawn = None
    if call.strategy == SAMPLING and ours is not None and ours.error is None:
        drawn = Drawn(ours.sequences[:, call.num_read :])
    torch.manual_seed(0)
    try:
        with drawing(drawn):
            output = model.generate(**given)
        if "again" in call.extras:
            given = continue_text(call, given, output)
            if call.is_pair:  # it takes the columns of the encoder's mask for those that the decoder has read
                del given["past_key_values"]
            output = model.generate(**given)
    except Exception as error:
        return Answer(error=error)
    return Answer(bring_home(output), streamed=told.told)
