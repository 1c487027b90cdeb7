"""Whisper (Radford et al., 2022): an encoder that reads log-mel features, and a decoder that writes what was said."""

from __future__ import annotations

from typing import Final

from unspool.kernels.activations import find_activation
from unspool.models.decoder.spec import NormSpec
from unspool.models.encoder_decoder.layers import PairNames
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec, PositionSpec
from unspool.models.families.bart import EPS, has_tensor, name_stack, read_stack
from unspool.models.families.pair import PairFamily, read_pair_ids
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource
from unspool.protocols import FeatureShape


def _read_config(config: Settings, source: WeightSource) -> EncoderDecoderSpec:
    hidden_size = config.integer("d_model", "hidden_size")
    activation = config.text("activation_function", default="gelu")
    find_activation(activation)
    vocab_size, num_sources = config.integer("vocab_size"), config.integer("max_source_positions", default=1_500)
    positions = PositionSpec("learned", num_sources)  # sinusoids, which the files carry
    texts = PositionSpec("learned", config.integer("max_target_positions", default=448))
    return EncoderDecoderSpec(
        family="whisper",
        hidden_size=hidden_size,
        encoder=read_stack(config, "encoder", vocab_size, hidden_size, positions),
        decoder=read_stack(config, "decoder", vocab_size, hidden_size, texts),
        norm=NormSpec("layer", EPS, has_bias=True),
        has_bias=True,
        activation=activation,
        is_head_tied=config.boolean("tie_word_embeddings", default=True) or not has_tensor(source, "proj_out.weight"),
        features=FeatureShape(config.integer("num_mel_bins", default=80), 2 * num_sources, 2),
        **read_pair_ids(
            config, bos_token_id=50_256, eos_token_id=50_256, pad_token_id=50_256, decoder_start_token_id=50_257
        ),
    )


def _find_names(_: EncoderDecoderSpec, __: WeightSource) -> PairNames:
    return PairNames(name_stack("encoder"), name_stack("decoder"), head="proj_out", prefix="model.")


WHISPER: Final = PairFamily(
    name="whisper",
    architectures=("WhisperForConditionalGeneration",),
    model_types=("whisper",),
    read_config=_read_config,
    find_names=_find_names,
)
