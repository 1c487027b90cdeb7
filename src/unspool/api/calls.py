"""The entry points in the reference's form: `generate(model, **inputs, **settings)`, and `stream`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from unspool.api.core import find_object, is_wrapped_by_peft
from unspool.api.opening import find_speech, read_config
from unspool.api.recipes import run_recipe
from unspool.api.speech import generate_speech
from unspool.api.starting import start
from unspool.callbacks import check_streamer
from unspool.config import GenerationConfig
from unspool.config.pairs import ConfigFacts, check_methods
from unspool.decoding.loop import Emitted
from unspool.decoding.prompts import mark_columns
from unspool.decoding.run import Run
from unspool.errors import SettingError
from unspool.models.adapters import (
    ColumnModel,
    dress_output,
    find_deciding_hook,
    find_preparing,
    prepare_with,
    run_own_loop,
    run_their_loop,
    wants_own_loop,
)
from unspool.outputs import GenerateOutput
from unspool.plan.tables.calls import OF_SEQUENCES, OF_STREAM
from unspool.streaming import StreamCancelled


def generate(
    model: Any,
    inputs: Any = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    use_model_defaults: bool | None = None,
    custom_generate: Any = None,
    **kwargs: Any,
) -> torch.Tensor | GenerateOutput:
    """Generate token ids: a tensor (rows, length), or an output object with `return_dict_in_generate=True`.

    Beside these arguments it takes the model's inputs (`input_ids`, `attention_mask`, `inputs_embeds`, …), a
    `tokenizer` for `stop_strings` (and, with an `assistant_tokenizer`, for a draft model of another vocabulary),
    `past_key_values`, and every setting of `GenerationConfig`. `custom_generate` (or `recipe`) is a decoding method of
    somebody's own: a folder, a hub id, a shipped recipe's name, or a function; see docs/recipes.md.
    """
    if isinstance(inputs, Mapping):  # what a tokenizer or a feature extractor returned, with all its names
        kwargs, inputs = {**inputs, **kwargs}, None
    check_streamer(streamer)
    recipe = kwargs.pop("recipe", None)
    if recipe is not None and custom_generate is not None:
        raise SettingError("`recipe` and `custom_generate` are two names of one argument; give one")
    recipe = custom_generate if recipe is None else recipe
    answer: torch.Tensor | GenerateOutput  # or what a recipe or a model of theirs likes to return
    given = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "assistant_model": assistant_model,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
    }
    if recipe is not None:
        usual = {**given, "streamer": streamer}
        answer = run_recipe(recipe, generate, start, model, inputs, generation_config, usual, kwargs)
        return answer
    given |= {"synced_gpus": synced_gpus, "use_model_defaults": use_model_defaults}
    if is_wrapped_by_peft(model):  # whose own generate() puts what was trained before or into the common one's passes
        whole = given | {"generation_config": generation_config, "streamer": streamer}
        settings = {name: value for name, value in whole.items() if value is not None} | kwargs
        first = [] if inputs is None else [inputs]
        answer = prepare_with(type(model).generate, model, generate, *first, **settings)
        return answer
    theirs = find_object(model)
    hook = None if theirs is None or find_preparing(theirs) is not None else find_deciding_hook(theirs)
    if hook is not None:
        given |= {"generation_config": generation_config, "streamer": streamer}
        answer = run_their_loop(theirs, hook, inputs, given, kwargs)
        return answer
    speech = find_speech(model)
    preparing = None if theirs is None or speech is not None else find_preparing(theirs)
    if preparing is not None or (theirs is not None and wants_own_loop(theirs, generation_config, kwargs)):
        given |= {"generation_config": generation_config, "streamer": streamer}
        if preparing is None:
            answer = run_own_loop(theirs, inputs, given, kwargs)
            return answer
        settings = {name: value for name, value in given.items() if value is not None} | kwargs
        first = [] if inputs is None else [inputs]
        answer = prepare_with(preparing, theirs, generate, *first, **settings)
        return answer
    if speech is not None:
        arguments = {**given, "generation_config": read_config(generation_config, model), **kwargs}
        if inputs is not None:
            arguments["input_features"] = inputs
        use, finish = partial(_use, streamer), partial(_finish, model)
        begin, is_streamed = partial(start, model), streamer is not None
        answer = generate_speech(speech, begin, arguments, use, finish, is_streamed=is_streamed)
        return answer
    run = start(model, inputs, generation_config, **given, **kwargs)
    _use(streamer, run)
    return _finish(model, run)


def _finish(model: Any, run: Run) -> torch.Tensor | GenerateOutput:
    """What a run that has ended returns: in the form of transformers' classes if the model is an object of theirs."""
    finish = run.parts.model.finish if isinstance(run.parts.model, ColumnModel) else None
    if not run.parts.returns_output:
        return run.sequences() if finish is None else finish(run.sequences())
    output = run.output()
    if finish is not None and output.sequences is not None:
        output.sequences = finish(output.sequences)
    if find_object(model) is not None:
        # An object of transformers' class, which has the same fields.
        dressed: GenerateOutput = dress_output(output, run.parts.model, mark_columns(run.parts.prompts))
        return dressed
    return output


def _use(streamer: Any, run: Run) -> None:
    """Iterate a run to its end, with the caller's streamer if there is one."""
    check_methods(ConfigFacts(run.parts.settings), OF_SEQUENCES)
    if streamer is None:
        for _ in run:
            pass
    else:
        feed(streamer, run)


def stream(
    model: Any, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
) -> Iterator[Emitted]:
    """What `generate` does, step by step: each row's tokens as they are chosen. Closing the iterator stops the work."""
    run = start(model, inputs, generation_config, **kwargs)
    check_methods(ConfigFacts(run.parts.settings), OF_STREAM)
    return iter(run)


def feed(streamer: Any, run: Run, steps: Iterable[Emitted] | None = None) -> None:
    """Give a streamer (`put` and `end`) the prompt, then every step's tokens: one per row, or several of one row.

    The steps are the run's own, or those that somebody else drives.
    """
    pad = run.parts.plan.pad_token_id
    if run.num_rows > 1 and run.parts.has_bursts:
        raise SettingError(
            f"a streamer takes one token of each row a step, and {run.num_rows} rows get different numbers of them "
            "from beams or a drafter; stream one row, or use stream() and lm.stream()"
        )
    try:
        streamer.put(run.parts.prompt_ids.cpu())
        for emitted in run if steps is None else steps:
            if run.num_rows == 1:
                tokens = emitted.tokens.get(0, [])
            else:
                tokens = [emitted.tokens.get(row, [pad])[-1] for row in range(run.num_rows)]
            if tokens:
                streamer.put(torch.tensor(tokens))
    except StreamCancelled:
        pass
    except BaseException as error:
        # A reader in another thread must not wait for ever.
        if hasattr(streamer, "fail"):
            streamer.fail(error)
        else:
            streamer.end()
        raise
    streamer.end()
