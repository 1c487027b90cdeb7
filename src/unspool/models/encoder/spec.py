"""The description of a plain encoder: BERT and XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.models.decoder.spec import NormSpec
from unspool.models.encoder_decoder.spec import StackSpec
from unspool.models.families.base import refuse_quantised
from unspool.models.settings import Settings

# The names of `config.json`'s `architectures`, and where each keeps its blocks.
PREFIXES: Final = {
    "BertForTokenClassification": "bert",
    "XLMRobertaForTokenClassification": "roberta",
    "RobertaForTokenClassification": "roberta",
}
_MOST_LABELS: Final = 1024


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One configurable encoder: norms stand after residual sums, positions are learned."""

    family: str
    prefix: str  # of the checkpoint's names
    hidden_size: int
    encoder: StackSpec
    num_positions: int  # of the table, those before a text's first among them
    num_types: int  # of segments; texts are of the first
    num_labels: int
    norm: NormSpec
    activation: str
    uncounted_id: int | None = None  # a token without a position (RoBERTa's padding): positions begin behind its id
    is_norm_first: bool = False
    is_gated: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.num_positions - (0 if self.uncounted_id is None else self.uncounted_id + 1)


def is_token_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a model that has labels for tokens."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForTokenClassification") for name in names)


def read_encoder(config: Mapping[str, Any]) -> EncoderSpec:
    """The description in a `config.json`."""
    names = config.get("architectures") or []
    known = next((name for name in names if name in PREFIXES), None) if isinstance(names, list) else None
    if known is None:
        raise UnsupportedError(
            f"config.json names the architecture {str(names)[:100]}, which is no token classifier that is read; these "
            f"are: {', '.join(PREFIXES)}"
        )
    settings = Settings(config)
    refuse_quantised(settings)
    settings.refuse("position_embedding_type", "relative_key", "relative_key_query", because="positions are absolute")
    settings.refuse("is_decoder", True, because="a token classifier reads in both directions")
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if hidden % heads:
        raise LoadError(f"{settings.where} divides a hidden size of {hidden} among {heads} heads")
    activation = settings.text("hidden_act", default="gelu")
    find_activation(activation)
    is_roberta = PREFIXES[known] == "roberta"
    vocab_size = settings.integer("vocab_size")
    pad = settings.token("pad_token_id")
    made = EncoderSpec(
        family=settings.text("model_type", default="bert"),
        prefix=PREFIXES[known],
        hidden_size=hidden,
        encoder=StackSpec(
            vocab_size,
            settings.integer("num_hidden_layers"),
            heads,
            hidden // heads,
            settings.integer("intermediate_size"),
            attention_scale=(hidden // heads) ** -0.5,
        ),
        num_positions=settings.integer("max_position_embeddings", default=512),
        num_types=_read_small(settings, "type_vocab_size", 2),
        num_labels=_count_labels(settings),
        norm=NormSpec("layer", settings.number("layer_norm_eps", default=1e-12), has_bias=True),
        activation=activation,
        uncounted_id=(1 if pad is None else pad) if is_roberta else None,
    )
    if made.longest < 3:
        raise LoadError(f"{settings.where} has {made.num_positions} positions, which hold no text")
    return made


def _read_small(settings: Settings, name: str, default: int) -> int:
    value = settings.find(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_LABELS:
        raise LoadError(f"{settings.where} has {name}={value!r:.40}; it is a whole number from 1 to {_MOST_LABELS}")
    return value


def _count_labels(settings: Settings) -> int:
    labels = settings.find("id2label")
    if isinstance(labels, Mapping) and labels:
        return len(labels)
    return _read_small(settings, "num_labels", 2)
