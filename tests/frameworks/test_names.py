"""The 41 names: which there are, and their arguments and fields as transformers 4.52.4 has them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from typing import Any

import pytest

import unspool

WITHOUT_ENCODER = "attentions hidden_states"
WITH_ENCODER = "encoder_attentions encoder_hidden_states decoder_attentions cross_attentions decoder_hidden_states"
OUTPUTS = {
    **{
        f"TF{way}DecoderOnlyOutput": f"sequences scores {WITHOUT_ENCODER}"
        for way in ("GreedySearch", "Sample", "ContrastiveSearch")
    },
    **{
        f"TF{way}EncoderDecoderOutput": f"sequences scores {WITH_ENCODER}"
        for way in ("GreedySearch", "Sample", "ContrastiveSearch")
    },
    **{
        f"TF{way}DecoderOnlyOutput": f"sequences sequences_scores scores beam_indices {WITHOUT_ENCODER}"
        for way in ("BeamSearch", "BeamSample")
    },
    **{
        f"TF{way}EncoderDecoderOutput": f"sequences sequences_scores scores beam_indices {WITH_ENCODER}"
        for way in ("BeamSearch", "BeamSample")
    },
    "FlaxGreedySearchOutput": "sequences",
    "FlaxSampleOutput": "sequences",
    "FlaxBeamSearchOutput": "sequences scores",
}
FILTER = "filter_value=-inf, min_tokens_to_keep=1"
SHARED = {
    "ForcedBOSTokenLogitsProcessor": "bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "max_length, eos_token_id",
    "ForceTokensLogitsProcessor": "force_token_map",
    "MinLengthLogitsProcessor": "min_length, eos_token_id",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens, begin_index",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": f"top_k, {FILTER}",
    "TopPLogitsWarper": f"top_p, {FILTER}",
}
PROCESSORS = {
    **{f"{framework}{name}": arguments for framework in ("TF", "Flax") for name, arguments in SHARED.items()},
    "TFNoBadWordsLogitsProcessor": "bad_words_ids, eos_token_id",
    "TFNoRepeatNGramLogitsProcessor": "ngram_size",
    "TFRepetitionPenaltyLogitsProcessor": "penalty",
    "FlaxWhisperTimeStampLogitsProcessor": "generate_config, model_config, decoder_input_length",
}
BASES = {
    f"{framework}{name}" for framework in ("TF", "Flax")
    for name in ("LogitsProcessor", "LogitsWarper", "LogitsProcessorList")
}  # fmt: skip


def test_they_are_all_there_and_nothing_else_has_such_a_name() -> None:
    names = {*OUTPUTS, *PROCESSORS, *BASES}
    assert (sum(name.startswith("TF") for name in names), sum(name.startswith("Flax") for name in names)) == (25, 16)
    assert names == {name for name in unspool.__all__ if name.startswith(("TF", "Flax"))}


@pytest.mark.parametrize("name", PROCESSORS)
def test_arguments(name: str) -> None:
    kind = getattr(unspool, name)
    shown = [str(one.replace(annotation=one.empty)) for one in inspect.signature(kind.__init__).parameters.values()]
    assert ", ".join(shown[1:]) == PROCESSORS[name]
    base = "LogitsWarper" if name.endswith("Warper") else "LogitsProcessor"
    assert issubclass(kind, getattr(unspool, name[: 2 if name.startswith("TF") else 4] + base))
    assert list(inspect.signature(kind.__call__).parameters)[1:] == ["input_ids", "scores", "cur_len"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_a_dataclass_a_mapping_and_a_tuple(name: str) -> None:
    kind: Any = getattr(unspool, name)
    expected = OUTPUTS[name].split()
    assert [field.name for field in fields(kind)] == expected
    assert dict(kind()) == {} and kind()[:] == ()
    full = kind(**{field: [place] for place, field in enumerate(expected)})
    assert list(full) == expected and full[:] == tuple([place] for place in range(len(expected)))
    some = kind(sequences="ids")
    assert some["sequences"] == some.sequences == some[0] == "ids" and list(some) == ["sequences"]
    assert copy.deepcopy(some) == some and kind(*"a")["sequences"] == "a"
    if name.startswith("Flax"):
        assert some.replace(sequences="other").sequences == "other" and some.sequences == "ids"


def test_what_jax_compiles_may_return_a_flax_output() -> None:
    jax = pytest.importorskip("jax")
    for kind in (unspool.FlaxSampleOutput, unspool.FlaxBeamSearchOutput):
        found = jax.jit(lambda ids, kind=kind: kind(sequences=ids + 1))(jax.numpy.arange(3))
        assert isinstance(found, kind) and found.sequences.tolist() == [1, 2, 3] and list(found) == ["sequences"]
