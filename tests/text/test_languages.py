"""Language codes: what a tokenizer has, how sources are marked, and what a target begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tests.text.test_sentencepiece import IDS, MARIAN, write_folder
from tokenizers import models, pre_tokenizers, processors

from unspool.errors import SettingError
from unspool.text import Tokenizer, open_tokenizer
from unspool.text.languages import find_languages, mark_languages


def make_tokenizer(codes: tuple[str, str], *, is_last: bool = False) -> Tokenizer:
    """A tokenizer as NLLB and M2M100 have one: the language before the text; or after it, as mBART has it."""
    vocabulary = {"<unk>": 0, "</s>": 1, "hello": 2, codes[0]: 3, codes[1]: 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([*codes, "</s>"])
    single = f"$A </s> {codes[0]}" if is_last else f"{codes[0]} $A </s>"
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=single.replace("$A", "$A $B:1"), special_tokens=[("</s>", 1), (codes[0], 3)]
    )
    return Tokenizer(backend, special_tokens={"eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize(
    ("codes", "known"),
    [
        (("eng_Latn", "fra_Latn"), ["eng_Latn", "fra_Latn"]),
        (("en_XX", "fr_XX"), ["en_XX", "fr_XX"]),
        (("__en__", "__fr__"), ["en", "fr"]),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_source_is_marked_and_a_target_begins(codes: tuple[str, str], known: list[str], is_last: bool) -> None:
    tokenizer = make_tokenizer(codes, is_last=is_last)
    assert list(find_languages(tokenizer)) == known
    assert mark_languages(tokenizer, None, known[1]).forced_bos_token_id == 4
    assert tokenizer.encode("hello") == ([2, 1, 3] if is_last else [3, 2, 1])
    assert mark_languages(tokenizer, known[1], known[0]).forced_bos_token_id == 3
    assert tokenizer.encode("hello") == ([2, 1, 4] if is_last else [4, 2, 1])
    mark_languages(tokenizer, known[0], None)  # and back again
    assert tokenizer.encode("hello") == ([2, 1, 3] if is_last else [3, 2, 1])


def test_unknown_languages_are_refused() -> None:
    tokenizer = make_tokenizer(("eng_Latn", "fra_Latn"))
    with pytest.raises(SettingError, match=r"target language 'deu_Latn' is not one.*it knows eng_Latn, fra_Latn"):
        mark_languages(tokenizer, None, "deu_Latn")
    with pytest.raises(SettingError, match="source language"):
        mark_languages(tokenizer, "klingon", None)
    with pytest.raises(SettingError, match="without a tokenizer"):
        mark_languages(None, None, "fra_Latn")
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(SettingError, match="no place for a source's language"):
        mark_languages(tokenizer, "fra_Latn", None)


def test_a_marian_model_reads_its_target_in_the_source(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_folder(tmp_path, {"source.spm": MARIAN, "vocab.json": IDS}))
    marks = mark_languages(tokenizer, None, "deu")
    assert marks.forced_bos_token_id is None
    assert tokenizer.encode(marks.prefix + "hello") == [7, 3, 0]
    with pytest.raises(SettingError, match="marks none in its sources"):
        mark_languages(tokenizer, "fra", None)
