"""`PromptCompressor`: the class of the package llmlingua, with its arguments, its defaults and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from unspool.api.core import as_model
from unspool.api.language_model import load
from unspool.callbacks import check_callback
from unspool.compression.llmlingua import checks
from unspool.compression.llmlingua.budgets import choose_contexts, choose_sentences
from unspool.compression.llmlingua.counting import (
    SplitSentences,
    TokenCounter,
    check_counter,
    cut_sentences,
    describe_saving,
)
from unspool.compression.llmlingua.labels import Labeller
from unspool.compression.llmlingua.options import Options, pick, refuse_unread
from unspool.compression.llmlingua.ranks import rank_contexts
from unspool.compression.llmlingua.records import read_record, tag_record
from unspool.compression.llmlingua.recovery import recover_words
from unspool.compression.llmlingua.scorer import Scorer
from unspool.compression.llmlingua.segments import Segment, SegmentedContext, join_alike, read_segments
from unspool.compression.llmlingua.token_filter import Watch, filter_tokens
from unspool.compression.llmlingua.windows import SEPARATOR, plan_segments, plan_windows
from unspool.compression.llmlingua.word_options import WordOptions
from unspool.compression.llmlingua.words import WordCompressor
from unspool.errors import InputError, SettingError, UnsupportedError, excerpt
from unspool.loading.token_classifier import load_classifier, open_classifier
from unspool.models.encoder.classifier import TokenClassifier
from unspool.text import Tokenizer

_NUM_PREFIX: Final = 100  # tokens of a long question's beginning that stay
_MODEL_KEYS: Final = ("trust_remote_code", "torch_dtype", "pad_to_left", "revision")
_BOS_TEXTS: Final = ("<s> ", "<s>")  # what the package takes out of every answer, whoever wrote it


@dataclass(frozen=True, slots=True)
class _Texts:
    """What a call compresses: contexts, and what stands before and behind them."""

    contexts: list[str]
    instruction: str
    question: str
    segmented: list[SegmentedContext] | None = None


class PromptCompressor:
    """Shorter prompts by a small model, with the arguments and the answers of the package llmlingua 0.2.2.

    LLMLingua (Jiang et al., 2023) and LongLLMLingua (2024) judge tokens by a causal model's losses, LLMLingua-2 (Pan et
    al., 2024) words by a token classifier's labels.
    `model_name` is what `unspool.load` takes, or a model that is loaded: an `lm`, or a model of transformers with
    `tokenizer`. `oai_tokenizer` counts the tokens of results (an object with `encode(text)`); without it they are
    estimated. `split_sentences` cuts a context for the sentence filter.
    """

    def __init__(
        self,
        model_name: Any = "NousResearch/Llama-2-7b-hf",
        device_map: str | None = None,
        model_config: Mapping[str, Any] | None = None,
        open_api_config: Mapping[str, Any] | None = None,
        use_llmlingua2: bool = False,
        llmlingua2_config: Mapping[str, Any] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        oai_tokenizer: TokenCounter | None = None,
        split_sentences: SplitSentences | None = None,
    ) -> None:
        checks.check_switch("use_llmlingua2", use_llmlingua2)
        if open_api_config:
            raise UnsupportedError(
                "`open_api_config` is for ranking with a service, which this compressor does not call; leave it out"
            )
        self.use_llmlingua2 = use_llmlingua2
        self.oai_tokenizer = check_counter(oai_tokenizer)
        self._split_sentences = split_sentences or cut_sentences
        config = _read_model_config(model_config)
        if llmlingua2_config and not use_llmlingua2:
            raise SettingError("`llmlingua2_config` is for token classifiers; add use_llmlingua2=True, or leave it out")
        if isinstance(model_name, str | Path):
            model, own = _load(model_name, device_map, config, is_classifier=use_llmlingua2)
        elif isinstance(model_name, TokenClassifier):
            model, own = model_name, None
        else:
            model, own = as_model(model_name), getattr(model_name, "tokenizer", None)
        found = tokenizer or own
        if found is None:
            raise InputError("a compressor needs the model's tokenizer, and none came with it; give tokenizer=")
        self.model, self.tokenizer = model, found
        self._scorer = Scorer(model, found)
        self._labeller: Labeller | None = None
        if isinstance(model, TokenClassifier) != use_llmlingua2:
            raise UnsupportedError(
                "use_llmlingua2=True is for token classifiers, and the model has losses; leave it out"
                if use_llmlingua2
                else "the model is a token classifier, which has no losses; add use_llmlingua2=True"
            )
        if use_llmlingua2:
            batch, marks = _read_llmlingua2(llmlingua2_config)
            self._labeller = Labeller(model, found, batch_size=batch, num_marks=marks)
        else:
            self._scorer.check()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`compress_prompt`."""
        return self.compress_prompt(*args, **kwargs)

    # --- the calls -------------------------------------------------------------------------------------
    def compress_prompt(
        self,
        context: str | Sequence[str],
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        iterative_size: int = 200,
        force_context_ids: Sequence[int] | None = None,
        force_context_number: int | None = None,
        use_sentence_level_filter: bool = False,
        use_context_level_filter: bool = True,
        use_token_level_filter: bool = True,
        keep_split: bool = False,
        keep_first_sentence: int = 0,
        keep_last_sentence: int = 0,
        keep_sentence_number: int = 0,
        high_priority_bonus: float = 100,
        context_budget: str = "+100",
        token_budget_ratio: float = 1.4,
        condition_in_question: str = "none",
        reorder_context: str = "original",
        dynamic_context_compression_ratio: float = 0.0,
        condition_compare: bool = False,
        add_instruction: bool = False,
        rank_method: str = "llmlingua",
        concate_question: bool = True,
        context_segs: Sequence[Sequence[str]] | None = None,
        context_segs_rate: Sequence[Sequence[float]] | None = None,
        context_segs_compress: Sequence[Sequence[bool]] | None = None,
        target_context: int = -1,
        context_level_rate: float = 1.0,
        context_level_target_token: float = -1,
        return_word_label: bool = False,
        word_sep: str = "\t\t|\t\t",
        label_sep: str = " ",
        token_to_word: str = "mean",
        force_tokens: Sequence[str] = (),
        force_reserve_digit: bool = False,
        drop_consecutive: bool = False,
        chunk_end_tokens: Sequence[str] = (".", "\n"),
        strict_preserve_uncompressed: bool = True,
        *,
        progress: Watch | None = None,
    ) -> dict[str, Any]:
        """The contexts without the tokens that the model could guess, between instruction and question.

        Returns `compressed_prompt` and the counts `origin_tokens`, `compressed_tokens`, `ratio`, `rate`, `saving`.
        Arguments from `target_context` on are LLMLingua-2's. `progress(done, total)` is called with tokens.
        """
        given = locals()
        check_callback("progress", progress, "done, total")
        if self._labeller is not None:
            refuse_unread(given, Options, WordOptions, "LLMLingua-2 does not read it; leave it out")
            words = WordCompressor(self._labeller, self.oai_tokenizer)
            return words.compress(_read_some(context), pick(WordOptions, given), progress)
        refuse_unread(given, WordOptions, Options, "it is for token classifiers (use_llmlingua2=True); leave it out")
        options = pick(Options, given)
        texts = _Texts(
            checks.read_contexts(context),
            checks.check_text("instruction", instruction),
            checks.check_text("question", question),
            _read_given_segments(context, context_segs, context_segs_rate, context_segs_compress),
        )
        return self._compress(texts, options, progress)

    def structured_compress_prompt(
        self,
        context: str | Sequence[str],
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        iterative_size: int = 200,
        force_context_ids: Sequence[int] | None = None,
        force_context_number: int | None = None,
        use_sentence_level_filter: bool = False,
        use_context_level_filter: bool = True,
        use_token_level_filter: bool = True,
        keep_split: bool = False,
        keep_first_sentence: int = 0,
        keep_last_sentence: int = 0,
        keep_sentence_number: int = 0,
        high_priority_bonus: float = 100,
        context_budget: str = "+100",
        token_budget_ratio: float = 1.4,
        condition_in_question: str = "none",
        reorder_context: str = "original",
        dynamic_context_compression_ratio: float = 0.0,
        condition_compare: bool = False,
        add_instruction: bool = False,
        rank_method: str = "llmlingua",
        concate_question: bool = True,
        strict_preserve_uncompressed: bool = True,
        *,
        progress: Watch | None = None,
    ) -> dict[str, Any]:
        """`compress_prompt` for contexts in tagged segments: `<llmlingua, rate=0.4>…</llmlingua>`, and
        `<llmlingua, compress=False>…</llmlingua>` for words that stay."""
        options = pick(Options, locals())
        check_callback("progress", progress, "done, total")
        if self.use_llmlingua2:
            raise UnsupportedError(
                "a token classifier does not keep the tags of segments; use a causal model, or compress_prompt()"
            )
        tagged = checks.read_contexts(context)
        checks.check_text("instruction", instruction)
        checks.check_text("question", question)
        lengths = [self._scorer.count(text) for text in tagged]  # tags count, as in the package
        if options.target_token > sum(lengths):
            raise SettingError(
                f"`target_token`={options.target_token:g} is more than the {sum(lengths)} tokens of the contexts; give "
                "fewer, or a rate"
            )
        rate = options.rate if options.target_token == -1 else options.target_token / sum(lengths)
        segmented = [read_segments(text, rate) for text in tagged]
        texts = _Texts([each.text for each in segmented], instruction, question, segmented)
        return self._compress(texts, options, progress, self._find_target(texts, options, lengths))

    def compress_json(
        self,
        json_data: Mapping[str, Any],
        json_config: str | Path | Mapping[str, Any],
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        iterative_size: int = 200,
        use_sentence_level_filter: bool = False,
        use_keyvalue_level_filter: bool = False,
        use_token_level_filter: bool = True,
        keep_split: bool = False,
        keep_first_sentence: int = 0,
        keep_last_sentence: int = 0,
        keep_sentence_number: int = 0,
        high_priority_bonus: float = 100,
        context_budget: str = "+100",
        token_budget_ratio: float = 1.4,
        condition_in_question: str = "none",
        reorder_keyvalue: str = "original",
        condition_compare: bool = False,
        rank_method: str = "llmlingua",
    ) -> dict[str, Any]:
        """A record with shorter values. `json_config` (a mapping, or the path of a YAML or JSON file) has for every key
        its `rate`, `compress`, `pair_remove` and `value_type`; numbers stay as they are."""
        if instruction:
            raise SettingError("`instruction` would stand before the record, which is then no JSON; leave it out")
        tagged = tag_record(json_data, json_config)
        made = self.structured_compress_prompt(
            tagged.contexts,
            question=question,
            rate=rate,
            target_token=target_token,
            iterative_size=iterative_size,
            force_context_ids=tagged.forced,
            use_sentence_level_filter=use_sentence_level_filter,
            use_context_level_filter=use_keyvalue_level_filter,
            use_token_level_filter=use_token_level_filter,
            keep_split=keep_split,
            keep_first_sentence=keep_first_sentence,
            keep_last_sentence=keep_last_sentence,
            keep_sentence_number=keep_sentence_number,
            high_priority_bonus=high_priority_bonus,
            context_budget=context_budget,
            token_budget_ratio=token_budget_ratio,
            condition_in_question=condition_in_question,
            reorder_context=reorder_keyvalue,
            condition_compare=condition_compare,
            rank_method=rank_method,
            concate_question=False,
            strict_preserve_uncompressed=False,
        )
        return {**made, "compressed_prompt": read_record(made["compressed_prompt"])}

    def recover(self, original_prompt: str, compressed_prompt: str, response: str) -> str:
        """A response in the words of the original prompt, where it quotes the compressed one."""
        for name, text in (("original_prompt", original_prompt), ("compressed_prompt", compressed_prompt)):
            checks.check_text(name, text)
        if not response:
            raise InputError("`response` is empty: there is nothing to recover")
        return recover_words(self._scorer, original_prompt, compressed_prompt, checks.check_text("response", response))

    # --- how -------------------------------------------------------------------------------------------
    def _find_target(self, texts: _Texts, options: Options, lengths: Sequence[int]) -> float:
        """Tokens that the contexts may keep: what was asked for, or what the rate leaves after all that stays."""
        if options.target_token != -1:
            return options.target_token
        instruction, question = self._scorer.count(texts.instruction), self._scorer.count(texts.question)
        whole = instruction + question + sum(lengths)
        return whole * options.rate - instruction - (question if options.concate_question else 0)

    def _compress(
        self, texts: _Texts, options: Options, progress: Watch | None, target: float | None = None
    ) -> dict[str, Any]:
        scorer, contexts = self._scorer, texts.contexts
        instruction, question = texts.instruction, texts.question
        if options.rank_method == "longllmlingua" and not question:
            raise SettingError("rank_method='longllmlingua' asks what the contexts say of a question; give `question`")
        forced = checks.read_ids("force_context_ids", options.force_context_ids, len(contexts))
        whole = SEPARATOR.join([instruction, *contexts, question]).strip()
        origin = len(self.oai_tokenizer.encode(whole))
        lengths = [scorer.count(text) for text in contexts]
        if target is None:
            target = self._find_target(texts, options, lengths)
        segments = None if texts.segmented is None else [list(each.segments) for each in texts.segmented]
        ratios = [0.0] * len(contexts)
        if len(contexts) > 1 and options.use_context_level_filter:
            if texts.segmented is not None and options.strict_preserve_uncompressed:
                kept = (place for place, each in enumerate(texts.segmented) if each.is_kept)
                forced += [place for place in kept if place not in forced]
            ranks = rank_contexts(scorer, contexts, question, options.rank_method, options.condition)
            chosen = choose_contexts(options, ranks, lengths, target, forced)
            contexts, ratios = [contexts[place] for place in chosen.places], chosen.ratios
            segments = None if segments is None else [segments[place] for place in chosen.places]
        if options.use_sentence_level_filter:
            split = self._split_sentences
            contexts, parts = choose_sentences(options, scorer, split, contexts, segments, target, question)
            segments = parts or None
        text = SEPARATOR.join(contexts)
        if options.use_token_level_filter:
            text = self._filter(options, texts, contexts, segments, ratios, target, progress)
        parts_of_prompt = [instruction] if instruction else []
        parts_of_prompt += [text] if text.strip() else []
        parts_of_prompt += [question] if question and options.concate_question else []
        made = SEPARATOR.join(parts_of_prompt)
        return {"compressed_prompt": made, **describe_saving(origin, len(self.oai_tokenizer.encode(made)))}

    def _filter(
        self,
        options: Options,
        texts: _Texts,
        contexts: Sequence[str],
        segments: Sequence[Sequence[Segment]] | None,
        ratios: Sequence[float],
        target: float,
        progress: Watch | None,
    ) -> str:
        """The contexts without the tokens that go."""
        scorer, size, start, read = self._scorer, options.iterative_size, 0, list(contexts)
        if options.puts_question_first:
            prefix = self._make_prefix(options, texts)
            start = _find_prefix_end(scorer, prefix + SEPARATOR, contexts[0])
            read = [prefix, *contexts]
        ids = scorer.encode(SEPARATOR.join(read))
        if not ids:
            raise InputError("the contexts have no tokens to compress; give a longer text")
        if segments is None:
            lengths = [scorer.count(text, is_bare=True) for text in contexts]
            windows = plan_windows(lengths, ratios, target, size)
        else:
            windows = plan_segments(scorer, contexts, [join_alike(each) for each in segments], ids[start:], size)
        kept = filter_tokens(
            scorer,
            ids,
            windows,
            size=size,
            start=start,
            compares=options.condition_compare,
            keeps_splits=options.keep_split,
            watch=progress,
        )
        text = scorer.tokenizer.decode(kept)
        for spelled in _BOS_TEXTS:
            text = text.replace(spelled, "")
        return text

    def _make_prefix(self, options: Options, texts: _Texts) -> str:
        """The question as it is read before the contexts, without its middle if it is long."""
        scorer, most = self._scorer, self._scorer.max_positions
        prefix = texts.question
        if options.add_instruction:
            prefix = f"{prefix}{SEPARATOR}{texts.instruction}"
        windows = 2 * options.iterative_size
        if most is None or scorer.count(prefix + SEPARATOR) + windows <= most:
            return prefix
        tokens = scorer.encode(prefix)
        rest = tokens[len(tokens) - most + 2 + _NUM_PREFIX + windows :]
        return scorer.tokenizer.decode(tokens[:_NUM_PREFIX] + rest)


def _find_prefix_end(scorer: Scorer, prefix: str, text: str) -> int:
    """How many tokens a prefix has before the text that follows it."""
    ids = scorer.encode(prefix + text[:100])
    least = max(scorer.count(prefix, is_bare=True) - 3, 1)
    last = len(ids) - 1
    end = next((end for end in range(least, last) if scorer.tokenizer.decode(ids[:end]) == prefix), last)
    if last < least or scorer.tokenizer.decode(ids[end:]) != text[:100]:
        raise InputError(
            "the question can't be told from the context in their tokens, which happens where a context begins with "
            "white space or is empty; strip the contexts, or compress without a condition"
        )
    return end


def _read_model_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict(config or {})
    for key in given:
        if key not in _MODEL_KEYS:
            raise SettingError(f"`model_config` has {excerpt(key)}; it takes {', '.join(_MODEL_KEYS)}")
    if given.pop("trust_remote_code", False):
        raise UnsupportedError("trust_remote_code=True runs code from a model's folder, which is never done here")
    given.pop("pad_to_left", None)  # nothing is padded here
    return given


def _load(name: str | Path, device_map: str | None, config: Mapping[str, Any], *, is_classifier: bool) -> Any:
    """A model and its tokenizer by name."""
    dtype, revision = config.get("torch_dtype"), config.get("revision")
    device, dtype = None if device_map == "auto" else device_map, None if dtype == "auto" else dtype
    classifier = open_classifier(name, revision=revision)
    if classifier is not None and is_classifier:
        return load_classifier(classifier, device, dtype or torch.float32)
    if classifier is not None or is_classifier:
        raise UnsupportedError(
            f"{excerpt(str(name))} is a token classifier, which has no losses; add use_llmlingua2=True"
            if classifier is not None
            else f"{excerpt(str(name))} is no token classifier, which use_llmlingua2=True asks for; leave it out"
        )
    lm = load(name, device=device, dtype=dtype, revision=revision)
    return lm.model, lm.tokenizer


def _read_llmlingua2(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """The sizes of batches and of the list of force tokens."""
    given = {"max_batch_size": 50, "max_force_token": 100, **(config or {})}
    if set(given) != {"max_batch_size", "max_force_token"}:
        raise SettingError(f"`llmlingua2_config`={excerpt(config)} takes max_batch_size and max_force_token")
    batch = checks.check_count("max_batch_size", given["max_batch_size"], 1, 4096)
    return batch, checks.check_count("max_force_token", given["max_force_token"], 0, 1024)


def _read_some(context: Any) -> list[str]:
    if context is None or context == []:
        raise InputError("`context` is empty; give a text, or a list of texts")
    return checks.read_contexts(context)


def _read_given_segments(context: Any, texts: Any, rates: Any, stays: Any) -> list[SegmentedContext] | None:
    """Segments that a caller made, as `structured_compress_prompt` makes them of tags."""
    if texts is None and rates is None and stays is None:
        return None
    contexts = checks.read_contexts(context)
    made = []
    try:
        for text, parts, own_rates, own_stays in zip(contexts, texts, rates, stays, strict=True):
            segments = tuple(
                Segment(len(part), checks.check_number("context_segs_rate", rate, 0, 1), bool(is_open), part)
                for part, rate, is_open in zip(parts, own_rates, own_stays, strict=True)
            )
            if "".join(parts) != text:
                raise ValueError("a context is not what its segments make")
            made.append(SegmentedContext(text, segments))
    except (TypeError, ValueError) as error:
        raise SettingError(
            "`context_segs`, `context_segs_rate` and `context_segs_compress` go together: for each context a list of "
            f"texts that make it, of rates and of switches ({error})"
        ) from error
    return made
