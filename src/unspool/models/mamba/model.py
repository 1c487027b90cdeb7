"""Mamba (Gu and Dao, 2023) and Falcon-Mamba: every layer has a recurrent state of fixed size, and no attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from unspool.cache import Cache, KeyShape, MambaCache, Span, make_cache
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.kernels.scan import convolve, scan, step
from unspool.models.arrangement import read_mask
from unspool.models.mamba.weights import MambaLayer, MambaSpec, MambaWeights
from unspool.models.native import ModelConfig, NativeModel, take_last
from unspool.models.paths.captured_states import CapturedStates, MambaWork
from unspool.models.weights import Embedding, Linear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, ModelInfo, Want
from unspool.shortage import explain_shortage


@dataclass
class MambaOutput(Output):
    """What calling a Mamba returns."""

    logits: torch.Tensor | None = None  # (rows, columns kept, vocab)
    cache_params: MambaCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = (
        None  # one per layer, then the normalised ones: (rows, columns, hidden)
    )

    @property
    def past_key_values(self) -> MambaCache | None:
        """The cache under the name that other models use."""
        return self.cache_params


class Mamba(NativeModel):
    """A decoder of Mamba blocks."""

    weights: MambaWeights[Any]

    def __init__(
        self,
        spec: MambaSpec,
        weights: MambaWeights[Any],
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        self.spec = spec
        self.weights = weights
        self.info = describe(spec)
        self.config = normalise(spec, config)
        self._refresh()

    def _refresh(self) -> None:
        self._activate = find_activation(self.spec.activation)
        self._captured = CapturedStates(self.spec, self.weights, self.device, self.dtype, MambaWork)

    @property
    def _layers(self) -> Sequence[Any]:
        """The blocks, as `_mix` takes them."""
        return self.weights.layers

    def get_input_embeddings(self) -> Embedding:
        return self.weights.embedding

    def get_output_embeddings(self) -> Linear:
        return self.weights.head

    def new_cache(
        self,
        kind: str = "mamba",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> MambaCache:
        """An empty cache for `rows` rows; states don't depend on `capacity`."""
        if encoded is not None:
            raise InputError("mamba has no encoder, so its cache takes no encoded states")
        if kind not in ("mamba", "dynamic"):
            raise UnsupportedError(
                f"a mamba model keeps states and no keys, and a {kind!r} cache holds keys; use 'mamba'"
            )
        cache = make_cache("mamba", self.key_shape, rows, capacity, config)
        assert isinstance(cache, MambaCache)
        return cache

    def _key_shape(self, num_layers: int) -> KeyShape:
        """No heads and no keys: states have the sizes that the config gives."""
        return KeyShape(num_layers, 0, 0, self.dtype, self.device, self.info.layer_kinds, config=self.config)

    # --- a forward pass ------------------------------------------------------------------------------
    @explain_shortage("a model read tokens")
    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        reason = self._captured.explain_refusal(tokens, cache, counts, want)
        if reason is None and tokens is not None:
            return self._captured.run(tokens, self._check_cache(cache))
        states, hidden = self._run(tokens, cache, counts, want, embeds)
        read = take_last(states, counts) if want.logits == "last" else states  # (rows, hidden) or (rows, new, hidden)
        head = self.weights.head
        early = tuple(head(take_last(hidden[layer], counts).to(self.dtype)) for layer in want.early) if hidden else None
        return Forward(
            head(read),
            hidden if want.hidden_states else None,
            last_states=states if want.last_states else None,
            early_logits=early or None,
            path_reason=reason or "",
        )

    @torch.no_grad()
    def follow(
        self, tokens: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The states that each block makes of those that another pass had there, then the normalised ones; and logits.

        `given` are that pass's states after each block. So what one block rounds does not reach the next.
        """
        states, made = self._run(tokens, self.new_cache(), None, Want("all", True), None, given)
        assert made is not None
        return made, self.weights.head(states)

    @torch.no_grad()
    def launch_step(self) -> None:
        """Launch the kernels of a step of one row (`captured_ahead.prepare_step`)."""
        self._captured.launch(self.new_cache())

    def _run(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        counts: Sequence[int] | None,
        want: Want,
        embeds: torch.Tensor | None,
        given: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Final states (rows, new, hidden), and those of all layers if any is wanted; see `follow` for `given`."""
        self._refuse_attentions(want.attentions)
        states = self._check_cache(cache)
        x = self.weights.embedding(tokens) if tokens is not None else embeds
        assert x is not None
        x = x.to(torch.float32 if self.spec.is_residual_float32 else self.dtype)  # (rows, new, hidden)
        span = states.begin(x.shape[0], x.shape[1], counts, self.device)
        past_end = self._find_past_end(span)
        keeps, hidden = want.hidden_states or bool(want.early), []
        for index, layer in enumerate(self._layers):
            x = x + self._mix(index, layer, layer.norm(x.to(self.dtype)), states, past_end)
            if keeps:
                hidden.append(x)
            if given:
                x = given[index].to(x.dtype)
        states.end()
        x = self.weights.final_norm(x).to(self.dtype)
        return x, (*hidden, x) if keeps else None

    def _mix(
        self, index: int, layer: Any, x: torch.Tensor, cache: MambaCache, past_end: torch.Tensor | None
    ) -> torch.Tensor:
        """What a block adds to the residual: (rows, new, hidden)."""
        assert isinstance(layer, MambaLayer)
        spec, space = self.spec, layer.space
        inputs, gate = layer.project_in(x).chunk(2, dim=-1)  # (rows, new, inner) each
        u = self._activate(convolve(cache.extend(index, inputs), space.conv, space.conv_bias))
        chosen = layer.select(u.to(self.dtype))
        time, b, c = torch.split(chosen.float(), [spec.time_rank, spec.state_size, spec.state_size], dim=-1)
        if spec.select_eps is not None:
            time, b, c = (_normalise_root(part, spec.select_eps) for part in (time, b, c))
        dt = F.softplus(layer.time(time.to(self.dtype)).float().add_(space.time_bias))
        if past_end is not None:
            dt = dt.masked_fill(past_end, 0.0)  # a step of no time leaves the state as it is
        held, following = cache.state(index), cache.next_state(index)
        if x.shape[1] == 1:
            y = step(held, dt[:, 0], space.decay, u[:, 0], b[:, 0], c[:, 0], following)[:, None]
        else:
            y, state = scan(held, dt, space.decay, u, b, c)
            following.copy_(state)
        cache.keep_inputs(index, (dt, u, b), partial(replay, scan, space.decay))
        y = torch.addcmul(y, u, space.skip).mul_(self._activate(gate))
        return layer.out(y.to(self.dtype))

    def _find_past_end(self, span: Span) -> torch.Tensor | None:
        """Which of the new positions are past their row's end: (rows, new, 1); None if none is."""
        if min(span.counts) == span.num_new:
            return None
        ends = torch.tensor(span.counts, device=self.device)[:, None]
        return (torch.arange(span.num_new, device=self.device) >= ends)[:, :, None]

    def _check_cache(self, cache: Cache) -> MambaCache:
        if not isinstance(cache, MambaCache):
            raise UnsupportedError(
                f"a mamba model can't decode with a {type(cache).__name__}, which holds keys; use a MambaCache"
            )
        misfit = cache.find_misfit(self.key_shape)
        if misfit is not None:
            raise SettingError(f"the cache was made for another model: {misfit}, or take model.new_cache()")
        return cache

    def _refuse_attentions(self, is_asked: bool | None) -> None:
        if is_asked:
            raise UnsupportedError(
                "attentions were requested and a mamba model has none: it keeps a state instead of attending to "
                "positions; output_hidden_states is available"
            )

    # --- the reference's way of calling ---------------------------------------------------------------
    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache_params: MambaCache | None = None,
        past_key_values: MambaCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> MambaOutput | tuple[Any, ...]:
        """Logits for the columns given, padded or not; `cache_params` and `past_key_values` are one argument."""
        if cache_params is not None and past_key_values is not None and cache_params is not past_key_values:
            raise InputError("cache_params and past_key_values are two names of one argument; give one")
        self._refuse_attentions(output_attentions)
        rows, num_new = self._check_input(input_ids, inputs_embeds, self.spec.hidden_size)
        cache = cache_params if cache_params is not None else past_key_values
        cache = self.new_cache(rows=rows) if cache is None else cache
        arranged = read_mask(attention_mask, rows, num_new, cache.lengths or [0] * rows)
        states, hidden = self._run(
            arranged.pack(input_ids.to(self.device)) if input_ids is not None else None,
            cache,
            arranged.counts,
            Want("all", bool(output_hidden_states)),
            arranged.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = MambaOutput(
            logits=self.weights.head(arranged.unpack(states)[:, keep]),
            cache_params=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, hidden)) if hidden is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()


def _normalise_root(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Values over the root of their mean square, without a weight."""
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def replay(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    decay: torch.Tensor,
    state: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    counts: Sequence[int],
) -> torch.Tensor:
    """The state after each row's first `counts[row]` positions of a pass, by the scan that it was made with."""
    dt, u, b = inputs
    ends = torch.tensor(list(counts), device=dt.device)[:, None]
    past_end = torch.arange(dt.shape[1], device=dt.device) >= ends
    return run(state, dt.masked_fill(past_end[:, :, None], 0.0), decay, u, b, None)[1]


def describe(spec: MambaSpec) -> ModelInfo:
    """What a model says of itself."""
    return ModelInfo(
        family=spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=0,
        layer_kinds=tuple(["state"] * spec.num_layers),
        has_tied_embeddings=spec.is_head_tied,
        bos_token_id=spec.bos_token_id,
        eos_token_id=spec.eos_token_id,
        pad_token_id=spec.pad_token_id,
        can=frozenset({"early_logits", "hidden_states", "inputs_embeds", "last_states"}),
    )


def normalise(spec: MambaSpec, config: Mapping[str, Any]) -> ModelConfig:
    """The config under the names of the reference."""
    eos = spec.eos_token_id
    common = {
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.inner_size,
        "num_hidden_layers": spec.num_layers,
        "state_size": spec.state_size,
        "conv_kernel": spec.kernel_size,
        "time_step_rank": spec.time_rank,
        "max_position_embeddings": None,
        "tie_word_embeddings": spec.is_head_tied,
        "is_encoder_decoder": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": spec.pad_token_id,
    }
    return ModelConfig(**{**config, **common})
