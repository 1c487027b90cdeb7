"""Make the small models that the scripts beside this file load: `python make_models.py FOLDER`.

Their weights are the random ones of the conformance tests, with room for longer texts; a tokenizer of characters and a
few pairs goes with each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

import unspool

GOLDENS = Path(__file__).parents[2] / "tests" / "conformance" / "goldens" / "models"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAIRS = (
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it"),
    *("al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le", "ve", "co", "me", "de", "hi", "ri"),
)
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


LONGEST = 2048  # positions
KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57]


def make_tokenizer(pairs: Sequence[str] = PAIRS) -> tokenizers.Tokenizer:
    """A tokenizer whose ids fit models with 160 tokens."""
    letters = [chr(code) for code in (10, *range(33, 127))]
    pieces = [*SPECIAL, *letters, "\u2581", *pairs]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [(pair[0], pair[1]) for pair in pairs]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never")
    made.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="never")
    made.add_special_tokens(list(SPECIAL))
    return made


def make_models(target: Path) -> None:
    """Write the folder of every model, of a draft model with another vocabulary, and of a watermark detector."""
    for source in sorted(GOLDENS.iterdir()):
        if source.is_dir():
            _make_model(source, target / source.name)
    _make_model(GOLDENS / "llama_draft", target / "vicuna", tuple(reversed(PAIRS)))
    marks = {"ngram_len": 5, "keys": KEYS, "sampling_table_size": 65536, "sampling_table_seed": 0}
    config = unspool.BayesianDetectorConfig(watermarking_depth=len(KEYS))
    config.set_detector_information("models/llama", {**marks, "context_history_size": 1024})
    unspool.BayesianDetectorModel(config).save_pretrained(target / "detector")


def _make_model(source: Path, folder: Path, pairs: Sequence[str] = PAIRS) -> None:
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    if source.name != "whisper":
        for name in ("max_position_embeddings", "n_positions"):
            if name in config:
                config[name] = LONGEST
        for name, table in weights.items():
            if name.endswith(("wpe.weight", "embed_positions.weight")):
                rows = LONGEST + table.shape[0] % 128  # OPT and BART keep two more
                weights[name] = table.repeat(-(-rows // table.shape[0]), 1)[:rows].contiguous()
    else:  # it marks times by its last tokens
        settings |= {"no_timestamps_token_id": 128, "is_multilingual": False, "max_initial_timestamp_index": 5}
        settings |= {"return_timestamps": False, "begin_suppress_tokens": [5, 2], "suppress_tokens": [1, 7]}
        settings |= {"max_length": 60, "alignment_heads": [[0, 1], [1, 0]]}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(pairs).save(str(folder / "tokenizer.json"))
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"}
    files = {
        "config.json": config,
        "generation_config.json": settings,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": CHAT,
            "model_max_length": 64,
        },
        "preprocessor_config.json": features | {"feature_size": 16, "chunk_length": 0.6, "sampling_rate": 16000},
    }
    for name, values in files.items():
        if name != "preprocessor_config.json" or source.name == "whisper":
            (folder / name).write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
