"""`pipeline("text2text-generation")`, `"summarization"`, `"translation"`: a text in, another one out."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from unspool.config import PARAMETERS
from unspool.errors import SettingError
from unspool.pretrained.pipelines.base import TextPipeline, split_texts
from unspool.text.languages import find_languages, mark_languages

_NAMES = {"summarization": "summary", "translation": "translation"}  # of what comes back; others: "generated"


class Text2TextPipeline(TextPipeline):
    """Reads texts and writes others: `[{"translation_text": …}]`, one for every input.

    By default at most 256 tokens are written by a search of four beams, unless the model's own settings, or those that
    its config has for the task, say otherwise.
    """

    default_settings = MappingProxyType({"max_new_tokens": 256, "num_beams": 4})

    def __init__(self, task: str, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        super().__init__(task, model, tokenizer, **settings)
        tasks = getattr(model.config, "task_specific_params", None) or {}
        own = tasks.get(task) if isinstance(tasks, dict) else None
        own = own if isinstance(own, dict) else {}
        self._task_settings = {name: value for name, value in own.items() if name in PARAMETERS}
        self.prefix = str(own.get("prefix") or "")
        parts = task.split("_")  # translation_en_to_de
        self._languages = (parts[1], parts[3]) if len(parts) == 4 and parts[2] == "to" else (None, None)

    def __call__(self, inputs: Any = None, **settings: Any) -> Any:
        """The text of one input, or one for every of several."""
        found = super().__call__(inputs, **settings)
        if isinstance(inputs, list | tuple) and all(len(one) == 1 for one in found):
            return [one[0] for one in found]
        return found

    def _split(self, inputs: Any) -> tuple[list[str], bool]:
        return split_texts(inputs)

    def _run(self, items: list[str], settings: dict[str, Any]) -> list[Any]:
        left_out = ("max_length", "min_length") if "max_new_tokens" in settings else ()
        own = {name: value for name, value in self._task_settings.items() if name not in left_out}
        settings = {**own, **settings}
        returns_ids = bool(settings.pop("return_tensors", False))
        if settings.pop("return_text", None) and returns_ids:
            raise SettingError("`return_text` and `return_tensors` exclude each other; give one of them")
        cleans = settings.pop("clean_up_tokenization_spaces", None)
        truncation = settings.pop("truncation", None)
        options = {} if truncation is None else {"truncation": truncation}
        prefix = self.prefix + self._mark(settings)
        sequences, _ = self._generate(self._encode([f"{prefix}{text}" for text in items], options), settings)
        word = _NAMES.get(self.task.split("_")[0], "generated")
        return [
            [
                {f"{word}_token_ids": row.tolist()}
                if returns_ids
                else {
                    f"{word}_text": self.tokenizer.decode(
                        row, skip_special_tokens=True, clean_up_tokenization_spaces=cleans
                    )
                }
                for row in rows
            ]
            for rows in sequences
        ]

    def _mark(self, settings: dict[str, Any]) -> str:
        """Mark the languages of a translation, if the tokenizer has tokens for them; returns the source's prefix."""
        given = settings.pop("src_lang", None), settings.pop("tgt_lang", None)
        if not self.task.startswith("translation"):
            if any(given):
                raise SettingError("`src_lang` and `tgt_lang` are a translation's; use pipeline('translation', …)")
            return ""
        known = find_languages(self.tokenizer) if hasattr(self.tokenizer, "backend_tokenizer") else {}
        named = tuple(code if code in known else None for code in self._languages)
        source, target = (one or other for one, other in zip(given, named, strict=True))
        if source is None and target is None:
            return ""
        marks = mark_languages(self.tokenizer, source, target)
        if marks.forced_bos_token_id is not None:
            settings.setdefault("forced_bos_token_id", marks.forced_bos_token_id)
        return marks.prefix
