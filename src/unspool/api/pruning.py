"""Which keys of a prefix each layer and head can do without, by the rule that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from unspool.cache.dynamic import DynamicCache
from unspool.decoding.reader import Reader
from unspool.errors import SettingError, UnsupportedError, excerpt
from unspool.numeric import is_number
from unspool.protocols import Model, Want

WINDOW: Final = 64  # last tokens whose attention decides, and which stay
_NEIGHBOURS: Final = 7  # keys that share the highest score among them: what matters seldom stands alone (SnapKV)
_QUERIES: Final = 32  # whose attention weights are held at a time
_WEIGHTS: Final = Want(attentions=True)
_EVERY: Final = Want(logits="all", finds_likeliest=False)


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is asked of a prefix that lets keys go."""

    ratio: float  # the share of keys that stays
    rule: str = "snapkv"
    window: int = WINDOW
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise SettingError(f"`ratio`={excerpt(self.ratio)} must be a number above 0, up to 1: the share that stays")
        if self.rule not in RULES:
            raise SettingError(f"`rule`={excerpt(self.rule)} is not known; use one of {', '.join(map(repr, RULES))}")
        for name, most in (("window", 4096), ("seed", 2**63)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise SettingError(f"`{name}`={excerpt(value)} must be a whole number from 0 to {most}")


@dataclass(slots=True)
class Held:
    """A prefix that was read: its tokens, its keys, and what it will be asked, if that is known."""

    model: Model
    ids: list[int]
    cache: DynamicCache
    asked: list[int]


def choose_keys(held: Held, asked: Pruning) -> tuple[list[torch.Tensor], list[int]]:
    """The places that each layer's heads keep (heads, count), and the places that most of them keep."""
    count = max(1, round(asked.ratio * len(held.ids)))
    scores = RULES[asked.rule](held, asked)  # one per layer: (heads, keys)
    together = torch.zeros(len(held.ids), device=scores[0].device)
    kept = []
    for each in scores:
        places = each.topk(count, dim=-1).indices.sort(dim=-1).values
        kept.append(places)
        together.scatter_add_(0, places.flatten(), torch.ones(places.numel(), device=together.device))
    return kept, together.topk(count).indices.sort().values.tolist()


# --- rules --------------------------------------------------------------------------------------------------


def _attend_last(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """SnapKV (Li et al., 2024): what the last tokens attend to, or what the question does."""
    count = len(held.ids)
    if held.asked:
        seen = _sum_weights(held, held.cache.clone(), held.asked)
        scores = [each[:, :count] for each in seen]
    else:
        window = min(max(asked.window, 1), count)
        cache = held.cache.clone()
        cache.truncate([count - window])
        scores = _sum_weights(held, cache, held.ids[count - window :])
    pooled = [_pool(each) for each in scores]
    if not held.asked:
        for each in pooled:
            each[:, count - window :] = torch.inf  # the window itself stays
    return pooled


def _attend_all(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """H2O (Zhang et al., 2023): the attention that a key got from all tokens, and the last ones."""
    scores = _sum_weights(held, held.model.new_cache(rows=1), held.ids)
    return [_keep_last(each, asked.window) for each in scores]


def _differ(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """KeyDiff (Park et al., 2025): keys that are least like the mean of all."""
    scores = []
    for keys, _ in _list_keys(held):
        unit = F.normalize(keys.float(), dim=-1)
        scores.append(-F.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1))
    return [_keep_last(each, asked.window) for each in scores]


def _by_norm(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """Devoto et al. (2024): keys of a small norm get much attention."""
    return [_keep_last(-keys.float().norm(dim=-1), asked.window) for keys, _ in _list_keys(held)]


def _by_loss(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """LLMLingua's: tokens that the model could not have guessed, the same for all heads."""
    losses = torch.full((len(held.ids),), torch.inf)
    reader = Reader(held.model, held.model.new_cache(rows=1), want=_EVERY)
    tokens = torch.tensor([held.ids], device=held.model.device)
    for first in range(0, len(held.ids) - 1, 128):
        part = tokens[:, first : min(first + 128, len(held.ids) - 1)]
        logits = reader.ask(part, None, _EVERY).logits[0].float()
        following = tokens[0, first + 1 : first + 1 + part.shape[1]]
        chosen = logits.gather(1, following[:, None])[:, 0]
        losses[first + 1 : first + 1 + part.shape[1]] = (logits.logsumexp(-1) - chosen).cpu()
    return _share(held, _keep_last(losses[None], asked.window)[0])


def _by_place(held: Held, _: Pruning) -> list[torch.Tensor]:
    """The first four tokens and the last ones, as attention sinks have it (Xiao et al., 2023)."""
    scores = torch.arange(len(held.ids), dtype=torch.float32)
    scores[:4] = torch.inf
    return _share(held, scores)


def _at_random(held: Held, asked: Pruning) -> list[torch.Tensor]:
    """Any keys: what the other rules must be better than."""
    generator = torch.Generator().manual_seed(asked.seed)
    return [
        _keep_last(torch.rand(keys.shape[:2], generator=generator).to(keys.device), asked.window)
        for keys, _ in _list_keys(held)
    ]


Rule = Callable[[Held, Pruning], list[torch.Tensor]]
RULES: Final[Mapping[str, Rule]] = {
    "snapkv": _attend_last,
    "h2o": _attend_all,
    "keydiff": _differ,
    "knorm": _by_norm,
    "llmlingua": _by_loss,
    "sinks": _by_place,
    "random": _at_random,
}
"""From a prefix to scores of its keys, one tensor (heads, keys) per layer; the highest stay."""


# --- what they read -----------------------------------------------------------------------------------------


def _list_keys(held: Held) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (heads, places, width) of every layer."""
    layers = (held.cache.read_layer(layer)[0] for layer in range(len(held.cache)))
    return [(kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)) for kv in layers]


def _sum_weights(held: Held, cache: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """The attention that every key gets from tokens which are read now: (key heads, keys) of each layer."""
    if "attentions" not in held.model.info.can:
        raise UnsupportedError(
            f"this {held.model.info.family} model returns no attention weights, which the rule looks at; use 'keydiff'"
        )
    tokens, heads = torch.tensor([ids], device=held.model.device), held.model.info.num_heads
    reader, summed = Reader(held.model, cache, want=_WEIGHTS), list[torch.Tensor]()
    for first in range(0, len(ids), _QUERIES):
        weights = reader.ask(tokens[:, first : first + _QUERIES], None, _WEIGHTS).attentions
        assert weights is not None
        for layer, each in enumerate(weights):
            key_heads = cache.read_layer(layer).shape[3]
            got = each[0].float().sum(1).view(key_heads, heads // key_heads, -1).mean(1)
            if layer < len(summed):
                got[:, : summed[layer].shape[1]] += summed[layer]
                summed[layer] = got
            else:
                summed.append(got)
    return summed


def _pool(scores: torch.Tensor) -> torch.Tensor:
    """The highest score (heads, keys) among neighbours. Their mean loses numbers, of which one digit is attended to."""
    return F.max_pool1d(scores, _NEIGHBOURS, stride=1, padding=_NEIGHBOURS // 2)


def _keep_last(scores: torch.Tensor, window: int) -> torch.Tensor:
    """The same with the last keys above all others."""
    if window:
        scores[:, -window:] = torch.inf
    return scores


def _share(held: Held, scores: torch.Tensor) -> list[torch.Tensor]:
    """Scores of tokens for all heads of all layers."""
    return [scores.to(keys.device).expand(keys.shape[0], -1) for keys, _ in _list_keys(held)]
