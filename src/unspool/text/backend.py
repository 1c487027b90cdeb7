"""Building tokenizers from vocabularies: byte-level BPE, sentencepiece BPE and unigram."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from unspool.errors import LoadError, UnsupportedError

SPACE = "\u2581"  # ▁, which sentencepiece writes for a space

MAX_MERGED_CHARACTERS = 512  # of a token that merges make: every cut of it is tried
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _REST
_TEKKEN = _CASED_WORDS % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_GPT4O = _CASED_WORDS % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _REST
)


@dataclass(frozen=True)
class Split:
    """How a byte-level family cuts text before merging, and what goes with that in its own tokenizer.json."""

    cut: Callable[[bool], list[pre_tokenizers.PreTokenizer]]  # of add_prefix_space
    takes_whole_words: bool = False  # a word that is a token is not merged again (ignore_merges)
    composes: bool = False  # text is brought to NFC first
    adds_bos: bool = False  # where the file does not say


def _plain(adds_prefix_space: bool) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space, use_regex=True)]


def _digits_alone(adds_prefix_space: bool) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_plain(adds_prefix_space)]


def _falcon(adds_prefix_space: bool) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        *_plain(adds_prefix_space),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]


def _by_regex(*patterns: str) -> Callable[[bool], list[pre_tokenizers.PreTokenizer]]:
    def cut(adds_prefix_space: bool) -> list[pre_tokenizers.PreTokenizer]:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space, use_regex=False)]

    return cut


_REMOVE_SPACES: list[normalizers.Normalizer] = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
_GPT2_SPLIT = Split(_plain)
_GPT2_NFC_SPLIT = Split(_plain, composes=True)
_DIGITS_SPLIT = Split(_digits_alone)
_LLAMA3_SPLIT = Split(_by_regex(_LLAMA3), takes_whole_words=True, adds_bos=True)
_LLAMA3_MERGED_SPLIT = Split(_by_regex(_LLAMA3))
_QWEN2_SPLIT = Split(_by_regex(_QWEN2), composes=True)
_GPT4O_SPLIT = Split(_by_regex(_GPT4O))
_BLOOM_SPLIT = Split(_by_regex(_BLOOM))

# By the names that GGUF files give them in `tokenizer.ggml.pre`. "default" is what a file says that was made
# before the names were: the plain split is the one that most byte-level families use.
SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "exaone4", "mellum", "gigachat"), _GPT2_SPLIT),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT2_SPLIT),
    **dict.fromkeys(("mpt", "olmo"), _GPT2_NFC_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS_SPLIT),
    "command-r": Split(_digits_alone, composes=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_SPLIT),
    **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGED_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_SPLIT),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), Split(_by_regex(_QWEN2))),
    "qwen35": Split(_by_regex(_QWEN35), composes=True),
    "tekken": Split(_by_regex(_TEKKEN), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_SPLIT),
    "falcon": Split(_falcon),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM_SPLIT),
    "viking": Split(_by_regex(_BLOOM, r"\p{N}")),
    "deepseek-coder": Split(_by_regex(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Split(_by_regex(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
}


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not even an Exception, into an error that says what it is."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its class can't be imported
            raise
        raise LoadError(f"the tokenizer's files are damaged, so that a text can't be worked on: {error}") from error


def find_split(name: str) -> Split:
    """The split of a family, by the name that GGUF files give it."""
    try:
        return SPLITS[name]
    except KeyError:
        raise UnsupportedError(
            f"the file cuts text into words the way of {name!r}, which is not known here, and guessing would give "
            f"wrong tokens. Known: {', '.join(sorted(SPLITS))}. Use the model's folder with its tokenizer.json"
        ) from None


def build_byte_level(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    split_name: str,
    *,
    adds_prefix_space: bool = False,
) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2 introduced it (Radford et al., 2019), with a family's way of cutting text."""
    split = find_split(split_name)
    try:
        model = models.BPE(dict(vocabulary), list(merges), ignore_merges=split.takes_whole_words)
    except Exception as error:  # the library raises plain Exception for merges that don't fit the vocabulary
        raise LoadError(f"the vocabulary and the merges don't fit each other: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts = split.cut(adds_prefix_space)
    backend.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend


def find_merges(tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: every way to make a token of two, best score first.

    Sentencepiece joins the neighbours whose union scores best. With a list of merges the same happens when they
    are in the order of their results' scores.
    """
    normal = set(tokens)
    ranked: list[tuple[float, int, str, str]] = []
    for token in tokens:
        # A longer one can't be reached by merges, as if its parts were not in the vocabulary.
        if not 2 <= len(token) <= MAX_MERGED_CHARACTERS:
            continue
        rank = (-scores[ids[token]], ids[token])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((*rank, left, right))
    ranked.sort(key=lambda merge: (merge[0], merge[1], ids[merge[2]], ids[merge[3]]))
    return [(left, right) for _, _, left, right in ranked]


def build_sentencepiece(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unk_token: str | None,
    adds_space_prefix: bool,
    charsmap: bytes | None = None,
    removes_extra_spaces: bool = False,
) -> tokenizers.Tokenizer:
    """Sentencepiece BPE (Kudo and Richardson, 2018): characters of the text itself, bytes for unknown ones."""
    try:
        model = models.BPE(
            dict(vocabulary), list(merges), unk_token=unk_token, fuse_unk=True, byte_fallback="<0x00>" in vocabulary
        )
        steps: list[normalizers.Normalizer] = [] if charsmap is None else [normalizers.Precompiled(charsmap)]
    except Exception as error:
        raise LoadError(f"the vocabulary and the merges don't fit each other: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if removes_extra_spaces:
        steps += _REMOVE_SPACES
    if adds_space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def build_unigram(
    pieces: Sequence[tuple[str, float]],
    *,
    unk_id: int | None,
    charsmap: bytes | None,
    adds_space_prefix: bool,
    removes_extra_spaces: bool,
) -> tokenizers.Tokenizer:
    """The unigram language model over pieces (Kudo, 2018), as T5 uses it."""
    try:
        model = models.Unigram(list(pieces), unk_id, byte_fallback=any(piece == "<0x00>" for piece, _ in pieces))
        steps: list[normalizers.Normalizer] = [] if charsmap is None else [normalizers.Precompiled(charsmap)]
    except Exception as error:
        raise LoadError(f"the vocabulary is not one of unigram pieces: {error}") from error
    backend = tokenizers.Tokenizer(model)
    scheme = "always" if adds_space_prefix else "never"
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    if removes_extra_spaces and adds_space_prefix:  # every word gets its space back, so all whitespace may go
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    else:
        backend.pre_tokenizer = words
        if removes_extra_spaces:
            steps += _REMOVE_SPACES
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return backend


def add_ends(backend: tokenizers.Tokenizer, *, bos_token: str | None, eos_token: str | None) -> None:
    """Put a token before and after every text, if asked."""
    ends = [token for token in (bos_token, eos_token) if token is not None]
    if not ends:
        return
    # Processing.Template writes "$A" for the text; a token in it is found by name.
    ids = {token: backend.token_to_id(token) for token in ends}
    single = [*([bos_token] if bos_token else []), "$A", *([eos_token] if eos_token else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(piece.replace("$A", "$B:1") for piece in single)],
        special_tokens=list(ids.items()),
    )
