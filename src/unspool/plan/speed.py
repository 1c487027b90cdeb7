"""What makes a call faster: a drafter, and steps that are compiled."""

from __future__ import annotations

from collections.abc import Mapping

from unspool.cache.kinds import KINDS
from unspool.config import GenerationConfig
from unspool.config.compiling import Compiling, read_compiling
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.call import PromptShape
from unspool.plan.drafting import Drafting, Relation, read_drafting
from unspool.plan.origins import SPOKEN, Origin, find_asked
from unspool.plan.pairs import Facts, check_methods
from unspool.plan.tables import DRAFTED_ROWS
from unspool.protocols import ModelInfo


def decide_drafting(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None,
    relation: Relation,
) -> Drafting | None:
    drafting = read_drafting(
        settings,
        find_asked(origins),
        has_assistant=assistant is not None,
        num_layers=info.num_layers,
        can=info.can,
        relation=relation,
    )
    if drafting is None:
        return None
    check_methods(Facts(settings, info, shape), DRAFTED_ROWS)
    if assistant is not None:
        _check_assistant(info, assistant, shape, relation)
    return drafting


def _check_assistant(info: ModelInfo, assistant: ModelInfo, shape: PromptShape, relation: Relation) -> None:
    if relation == "same" and assistant.vocab_size != info.vocab_size:
        raise SettingError(
            f"`assistant_model` has a vocabulary of {assistant.vocab_size} tokens and the model one of "
            f"{info.vocab_size}: its drafts would mean other texts; pass `tokenizer` and `assistant_tokenizer` to "
            "draft across tokenizers, or use a draft model with the same one"
        )
    if assistant.is_encoder_decoder != info.is_encoder_decoder:
        kinds = ("an encoder-decoder", "decoder-only")
        own, other = kinds if info.is_encoder_decoder else kinds[::-1]
        raise SettingError(
            f"`assistant_model` is {other} and the model is {own}; use a draft model of the same kind, or "
            "prompt_lookup_num_tokens"
        )
    if shape.has_embeds:
        raise SettingError(
            "`assistant_model` reads tokens, and inputs_embeds are the model's own; pass input_ids, or use "
            "assistant_early_exit"
        )
    if relation != "same" and info.is_encoder_decoder:
        raise SettingError(
            "`assistant_model` has another tokenizer than the model, and an encoder-decoder's source is not put into "
            "other tokens; use a draft model with the same tokenizer, or prompt_lookup_num_tokens"
        )
    room, needed = assistant.max_context, shape.longest
    if relation != "other" and room is not None and needed >= room:  # in other tokens, the prompt has other lengths
        raise SettingError(
            f"the prompt has {needed} tokens and the assistant_model's context ends at {room}; "
            "use one with a longer context"
        )


def decide_compiling(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape, cache_kind: str
) -> Compiling | None:
    """Whether steps are compiled; a `compile_config` that no step could follow is refused."""
    compiling = read_compiling(settings, find_asked(origins))
    if compiling is None:
        return None
    name = "compile_config" if compiling.is_forced else "compile"
    told = f"`{name}`, set {SPOKEN[origins[name]]}, asks for compiled steps"
    if "compile" not in info.can:
        raise UnsupportedError(f"{told}, and those of a {info.family} model can't be compiled yet; leave it out")
    is_plain = shape.cache_is_plain if shape.has_cache else KINDS[cache_kind].is_plain
    returned = [name for name in ("output_hidden_states", "output_attentions") if getattr(settings, name)]
    for is_so, reason in (
        (settings.use_cache is False, "`use_cache`=False reads every text anew at every step"),
        (bool(returned), f"`{', '.join(returned)}` returns what a compiled step does not keep"),
        (not is_plain, "this cache does not keep its keys in plain buffers; use a 'dynamic' or 'static' one"),
    ):
        if is_so and compiling.is_forced:
            raise SettingError(f"{told}, and {reason}; leave one of them out")
    return compiling
