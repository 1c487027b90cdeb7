"""Tokenizers from GGUF metadata, against transformers and against plain reference implementations."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unspool.errors import LoadError, UnsupportedError
from unspool.text import Tokenizer, tokenizer_from_gguf
from unspool.text.backend import SPLITS

TEXTS = [
    "Hello, world!", "", " ", "  ", "\n", "\t\tindented\n\n\n", "a", "don't we'll they've I'm you're he'd it's",
    "DON'T WE'LL", "1", "12", "123", "1234567890", "3.14159", "1,000,000", "v1.2.3-rc4", "x1y2z3", "2024-01-31",
    "$100.00", "50%", "²³¼½", "١٢٣", "१२३", "Ⅳ", "naïve café résumé", "Straße", "Ελληνικά", "Русский текст",
    "עברית", "العربية", "हिन्दी", "ไทย", "日本語のテキスト", "你好，世界！", "한국어 텍스트", "Tiếng Việt", "😀",
    "👨‍👩‍👧‍👦", "🇫🇷🏳️‍🌈",
    "e\u0301", "\u00e9", "ﬁ", "\u200b", "\ufeff", "\u00a0", "\u2028line", "a\u0000b", "trailing space ",
    "trailing spaces   ", " leading", "   leading", "in   between", "tab\tbetween", "\r\n", "a\r\nb", "mixed \n \t x",
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) { a[i] = 0; }", "<html><body>&amp;</body></html>",
    "SELECT * FROM t WHERE a='b';", "https://example.com/a?b=c&d=e#f", "me@example.org", "/usr/local/bin", "C:\\dir",
    "{'a': [1, 2, {'b': None}]}", "snake_case camelCase PascalCase kebab-case", "!!!", "...", "—", "“quoted”", "¿qué?",
    "~`@#$%^&*()_+-=[]{}|;':\",./<>?", "\\n\\t", "a" * 100, "ab" * 60, " " * 40, "\n" * 20, "word " * 30,
    "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>", "x<|endoftext|>y", "<|im_start|><|im_end|>", "<|im_start",
    "<repo_name>foo<file_sep>bar", "<empty_output>", " <|im_end|> ", "<jupyter_start>1+1<jupyter_output>2", "ﷺ", "𝔘𝔫𝔦",
    "𓀀𓀁", "a̐éö̲", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!", "ab\u202ecd", "\U0010ffff", "one  two   three    four",
    "I have 3 apples and 12 pears", "Once upon a time", "THE QUICK BROWN FOX", "The year is 1999.", "E=mc^2", "a+b=c",
]  # fmt: skip
# Where the split that transformers takes for this file (GPT-2's, without the digits) leads elsewhere.
SPACED_DIGITS = "a  1   22\n\n 3"


@pytest.fixture(scope="module")
def reference(smollm2_file: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


def test_at_least_a_hundred_texts() -> None:
    assert len(set(TEXTS)) >= 100


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000 + "a", "\n" * 1_000_000, "\U0001f680" * 250_000])
def test_smollm2_and_a_megabyte(smollm2: Tokenizer, text: str) -> None:
    start = time.process_time()
    assert smollm2.decode(smollm2.encode(text)) == text
    assert time.process_time() - start < 10


def test_smollm2_equals_transformers(smollm2: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        assert smollm2.encode(text) == reference.encode(text), text
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == reference.decode(ids) == text
    assert smollm2.bos_token == reference.bos_token
    assert smollm2.eos_token_id == reference.eos_token_id
    assert smollm2.pad_token_id == reference.pad_token_id
    assert smollm2.unk_token == reference.unk_token
    assert smollm2.get_vocab() == reference.get_vocab()
    assert len(smollm2) == len(reference)
    assert smollm2.chat_template == reference.chat_template


def test_smollm2_splits_as_its_own_tokenizer_json(smollm2: Tokenizer, reference: Any) -> None:
    from tokenizers import pre_tokenizers

    assert smollm2.encode(SPACED_DIGITS) != reference.encode(SPACED_DIGITS)
    backend = reference.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        for text in [*TEXTS, SPACED_DIGITS]:
            assert smollm2.encode(text) == reference.encode(text), text
    finally:
        backend.pre_tokenizer = before


def test_smollm2_chat_equals_transformers(smollm2: Tokenizer, reference: Any) -> None:
    messages = [{"role": "user", "content": "Hi <b>&"}, {"role": "assistant", "content": "Hello."}]
    for prompt in (True, False):
        expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert smollm2.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False) == expected
        ids = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert smollm2.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False) == ids
        both = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_tensors="pt")
        ours = smollm2.apply_chat_template(messages, add_generation_prompt=prompt, return_tensors="pt")
        assert ours.keys() == both.keys() and all(ours[name].equal(both[name]) for name in both)


@pytest.mark.parametrize("said", ["Hello.", " Hello. ", "Hi, Hi", "a\n"])
def test_a_last_message_is_continued_as_by_transformers(smollm2: Tokenizer, reference: Any, said: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    expected = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert smollm2.apply_chat_template(messages, continue_final_message=True, tokenize=False) == expected


def test_smollm2_is_built_quickly(smollm2_metadata: dict[str, Any]) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        tokenizer_from_gguf(smollm2_metadata)
        times.append(time.process_time() - start)
    assert min(times) < 0.5


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_split_loses_nothing(name: str, smollm2_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": name})
    for text in [*TEXTS, SPACED_DIGITS]:
        expected = unicodedata.normalize("NFC", text) if SPLITS[name].composes else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'm 1234  x\n\ny", ["I", "'m", "Ġ1234", "Ġ", "Ġx", "Ċ", "Ċ", "y"]),
        ("smollm", "I'm 1234  x", ["I", "'m", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("llama-bpe", "I'M 1234567 x\n\ny!\n", ["I", "'M", "Ġ", "123", "456", "7", "Ġx", "ĊĊ", "y", "!Ċ"]),
        ("qwen2", "I'M 123  x", ["I", "'M", "Ġ", "1", "2", "3", "Ġ", "Ġx"]),
        ("falcon", "a--b 12345", ["a", "--", "b", "Ġ", "123", "45"]),
        ("bloom", "Hi, you (12)", ["Hi", ",", "Ġyou", "Ġ(", "12", ")"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", "Ġ", "123", "4", "/Ċ"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("deepseek-coder", "a b\n12", ["a", "Ġb", "Ċ", "1", "2"]),
        ("deepseek-v3", "a.b 1234", ["a", ".b", "Ġ", "123", "4"]),
    ],
)
def test_splits_cut_where_their_families_do(
    name: str, text: str, words: list[str], smollm2_metadata: dict[str, Any]
) -> None:
    tokenizer = tokenizer_from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": name})
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in cut] == words


def test_first_tokens_by_family_and_by_key(smollm2_metadata: dict[str, Any]) -> None:
    silent = {key: value for key, value in smollm2_metadata.items() if not key.endswith("add_bos_token")}
    assert tokenizer_from_gguf(silent).encode("a") == [81]
    assert tokenizer_from_gguf({**silent, "tokenizer.ggml.pre": "llama-bpe"}).encode("a") == [1, 81]
    both = {**silent, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_from_gguf(both).encode("a") == [1, 81, 2]
    assert tokenizer_from_gguf(both).encode("a", add_special_tokens=False) == [81]


# --- sentencepiece ------------------------------------------------------------------------------------


def encode_by_hand(text: str, metadata: dict[str, Any]) -> list[int]:
    """Sentencepiece's BPE as it is described: join the two neighbours whose union scores best, from the left."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    normal = {
        token: (scores[index], index)
        for index, token in enumerate(tokens)
        if metadata["tokenizer.ggml.token_type"][index] == 1
    }
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(normal[a + b][0], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in normal]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = [1]
    for piece in pieces:
        if piece in normal:
            ids.append(normal[piece][1])
        else:
            ids.extend(tokens.index(f"<0x{byte:02X}>") for byte in piece.encode())
    return ids


@settings(max_examples=150)
@given(text=st.text(alphabet="theca sdonmglwirf", max_size=40) | st.text(max_size=12))
def test_sentencepiece_merges_by_score(
    text: str, sentencepiece_metadata: dict[str, Any], sentencepiece: Tokenizer
) -> None:
    text = text.replace("\u2581", "")  # the sign for a space decodes to one
    assume(not any(special in text for special in ("<unk>", "<s>", "</s>")))  # which a text may name
    assert sentencepiece.encode(text) == encode_by_hand(text, sentencepiece_metadata)
    assert sentencepiece.decode(sentencepiece.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_details(sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any]) -> None:
    tool = sentencepiece.convert_tokens_to_ids("<tool>")
    ids = sentencepiece.encode("the<tool>cat", add_special_tokens=False)
    assert tool in ids
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "the<tool> cat"  # user-defined tokens are text
    assert sentencepiece.all_special_ids == [1, 2, 0]
    bare = tokenizer_from_gguf({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" the cat", add_special_tokens=False)) == " the cat"
    assert bare.convert_ids_to_tokens(bare.encode("the")[1]) != sentencepiece.convert_ids_to_tokens(
        sentencepiece.encode("the")[1]
    )


def test_unigram_equals_transformers() -> None:
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -2.5), ("▁cat", -3.0), ("s", -3.5)]
    pieces += [
        ("at", -3.2),
        ("t", -4.0),
        ("h", -4.1),
        ("e", -4.2),
        ("c", -4.3),
        ("a", -4.4),
        ("▁c", -4.5),
        ("th", -4.6),
    ]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [3, 3, 2] + [1] * (len(pieces) - 3),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    reference = transformers.T5Tokenizer(vocab=pieces, extra_ids=0)
    for text in ["the cats", "cat", "  the   cat ", "thethe", "xyz", "the\ncat", "that cat's hat", ""]:
        assert tokenizer.encode(text) == reference.encode(text), text
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


# --- bad metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "rwkv"}, UnsupportedError, "gpt2, llama, t5"),
        ({"model": None}, LoadError, "no tokenizer"),
        ({"tokens": None}, LoadError, "no vocabulary"),
        ({"tokens": []}, LoadError, "no vocabulary"),
        ({"tokens": ["a", "a"], "token_type": None}, LoadError, "more than once"),
        ({"tokens": ["a", 3], "token_type": None}, LoadError, "not str"),
        ({"tokens": "ab"}, LoadError, "must be a list"),
        ({"token_type": [1]}, LoadError, "one a token"),
        ({"merges": None}, LoadError, "merges is missing"),
        ({"merges": ["ab"]}, LoadError, "not a pair"),
        ({"merges": ["nosuch token"]}, LoadError, "don't fit"),
        ({"bos_token_id": 10**6}, LoadError, "not an id"),
        ({"bos_token_id": -1}, LoadError, "not an id"),
        ({"bos_token_id": 1.5}, LoadError, "not an id"),
        ({"pre": "nosuch"}, UnsupportedError, "smollm"),
        ({"pre": 3}, LoadError, "must be a string"),
        ({"add_bos_token": "yes"}, LoadError, "true or false"),
    ],
)
def test_bad_metadata(change: dict[str, Any], error: type[Exception], words: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
    }
    assert tokenizer_from_gguf(metadata).encode("ab") == [2]
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(error, match=words):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    "scores", [None, [0.0], [float("nan")] * 3, [float("-inf")] * 3], ids=["none", "short", "nan", "infinite"]
)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_bad_scores(kind: str, scores: list[float] | None) -> None:
    metadata: dict[str, Any] = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    if scores is not None:
        metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(LoadError, match="scores"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("charsmap", [[1], [255] * 8, [3, 0, 0, 0, 1, 1, 1], [300] * 8, [-200] * 8])
def test_bad_charsmap(charsmap: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.precompiled_charsmap": charsmap,
    }
    with pytest.raises(LoadError, match="charsmap"):
        tokenizer_from_gguf(metadata)


def test_a_damaged_charsmap_is_refused_when_it_is_used() -> None:
    trie = [0xFF, 0xFF, 0xFF, 0x7F] * 2  # leads past its end
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.precompiled_charsmap": [8, 0, 0, 0, *trie, 97, 0],
    }
    with pytest.raises(LoadError, match="damaged"):
        tokenizer_from_gguf(metadata).encode("ab")


def test_a_charsmap_is_applied() -> None:
    # The smallest trie of sentencepiece's kind (a double array) that maps one character: "A" to "b".
    units = [0] * 512
    units[0] = 256 << 10  # the root's children lie from 256 on, each at 256 ^ its byte
    units[256 ^ 0x41] = (256 ^ 0x41 ^ 2) << 10 | 1 << 8 | 0x41  # "A", with its value at 2
    units[2] = 1 << 31  # the value: where in the texts its normal form begins
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    charsmap = len(trie).to_bytes(4, "little") + trie + b"b\0"
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "</s>", "▁b", "c", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    for numbers in (list(charsmap), [byte - 256 if byte > 127 else byte for byte in charsmap]):
        tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.precompiled_charsmap": numbers})
        assert tokenizer.encode("Ac") == [2, 3, 1]
    assert tokenizer_from_gguf(metadata).encode("Ac") != [2, 3, 1]
