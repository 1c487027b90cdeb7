"""What all native models share: config, weights, and moving between devices."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch

from unspool.cache import Cache, KeyShape, make_cache
from unspool.errors import InputError, UnsupportedError
from unspool.models.counting import count_parameters, describe_weights, iterate_held, name_formats
from unspool.models.handing import Origin, Reduced, identify, reduce_model
from unspool.models.placement import Placement
from unspool.models.weights import AnyEmbedding, AnyLinear, convert_tensors, iterate_tensors
from unspool.protocols import LAST, Encoded, Forward, ModelInfo, Want


class ModelConfig(SimpleNamespace):
    """A model's config with the names that most models use, and the attributes of the original file."""

    def to_dict(self) -> dict[str, Any]:
        """All values by name."""
        return dict(vars(self))


class NativeModel(ABC):
    """A model written for unspool: plain tensors, one forward pass, and the reference's way of calling."""

    info: ModelInfo
    config: ModelConfig
    weights: Any  # a tree of the containers of `weights`
    _SETTINGS: tuple[str, ...] = ("generation_config",)  # attributes that users change

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self.generation_config: Any = None
        self.placement: Placement | None = None  # where its parts lie, if not on one device
        self.origin: Origin | None = None  # where it was loaded from; None if it was built in memory

    def __repr__(self) -> str:
        size = f"{self.num_parameters():,} parameters"
        return f"{type(self).__name__}({self.info.family}, {size}, {describe_weights(self)}, {self.device})"

    # --- copies and other processes --------------------------------------------------------------------
    def __copy__(self) -> Self:
        """A model with settings of its own and the same weights."""
        return self._copy({id(tensor): tensor for tensor in iterate_tensors(self.weights)})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model with weights of its own."""
        return self._copy(memo)

    def _copy(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name in ("_device", "_dtype", "placement", "origin", "spec", "info", "config", "weights", *self._SETTINGS):
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        made._refresh()  # rebuilds what holds addresses, for the copy
        return made

    def __reduce__(self) -> Reduced:
        return reduce_model(self, {name: getattr(self, name) for name in self._SETTINGS})

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._dtype

    @abstractmethod
    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        """Read new tokens after what the cache holds, and advance the cache."""

    def encode(self, *_: Any, **__: Any) -> Encoded:
        """Run the encoder, if there is one."""
        raise UnsupportedError(f"{self.info.family} has no encoder")

    @abstractmethod
    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Cache:
        """An empty cache for `rows` rows; `config` is the call's `cache_config`."""

    @abstractmethod
    def get_input_embeddings(self) -> AnyEmbedding:
        """The table of token embeddings: callable on ids."""

    @abstractmethod
    def get_output_embeddings(self) -> AnyLinear:
        """The head: callable on final hidden states."""

    def _new_own_cache(
        self, kind: str, rows: int, capacity: int | None, num_layers: int, config: Mapping[str, Any] | None = None
    ) -> Cache:
        """A cache for the decoder's own keys."""
        return make_cache(kind, self._key_shape(num_layers), rows, capacity, config)

    @property
    def key_shape(self) -> KeyShape:
        """The shape of the keys, which a cache must match."""
        return self._key_shape(self.info.num_layers)

    @property
    def fingerprint(self) -> str:
        """An identifier of this model in every process: a hash of its files, its sizes, its dtype and some weights."""
        some = torch.arange(0, self.info.vocab_size, max(1, self.info.vocab_size // 64), device=self.device)
        rows = self.get_input_embeddings()(some)
        return identify(self, rows.flatten()[:: max(1, rows.shape[1] // 16)])

    def _key_shape(self, num_layers: int) -> KeyShape:
        sizes, heads = self.config, int(self.config.num_attention_heads)
        return KeyShape(
            num_layers=num_layers,
            num_kv_heads=int(getattr(sizes, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads),
            dtype=self.dtype,
            device=self.device,
            layer_kinds=self.info.layer_kinds,
            window=self.info.window,
            config=sizes,
        )

    def to(
        self,
        *args: torch.device | str | torch.dtype,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move the weights to another device, another dtype, or both."""
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            else:
                device = arg
        if dtype is not None and not dtype.is_floating_point:
            raise UnsupportedError(f"weights can't be kept in {dtype}; use a floating point type")
        place = torch.device(device) if device is not None else self._device
        if self.placement is not None and (place != self._device or dtype not in (None, self._dtype)):
            raise UnsupportedError(
                f"the model lies on {', '.join(map(str, self.placement.devices))} and is not moved; load it again with "
                "device= and dtype="
            )
        if self.is_quantised and (place.type != self._device.type or dtype not in (None, self._dtype)):
            raise UnsupportedError(
                f"the weights are quantised for {self._device.type} in {self._dtype} and can't be moved to "
                f"{dtype or place}; load the model again with device= and dtype=, or with quantize=None"
            )
        self._device = place
        self._dtype = dtype or self._dtype
        convert_tensors(self.weights, self._device, self._dtype)
        self._refresh()
        return self

    @abstractmethod
    def _refresh(self) -> None:
        """Rebuild what was derived from the weights, after they moved."""

    @property
    def is_quantised(self) -> bool:
        """Whether matrices are stored quantised."""
        return any(not tensor.is_floating_point() for tensor in self.parameters())

    def eval(self) -> Self:
        """Nothing to switch: native models only infer. Returns the model, as torch's modules do."""
        return self

    def parameters(self) -> list[torch.Tensor]:
        """The tensors of the weights, a tied one once."""
        return list({tensor.data_ptr(): tensor for tensor in iterate_tensors(self.weights)}.values())

    def num_parameters(self) -> int:
        """The number of parameters, however they are held; a tied head is counted once."""
        return count_parameters(iterate_held(self.weights))

    @property
    def weights_format(self) -> str:
        """In which formats the parameters are held, that of the most first: "float32", "int4 and int8"."""
        return name_formats(iterate_held(self.weights))

    @property
    def weights_bytes(self) -> int:
        """The memory of the weights, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parameters())

    def _check_input(
        self,
        tokens: torch.Tensor | None,
        embeds: torch.Tensor | None,
        width: int,
        vocab_size: int | None = None,  # of an encoder, if it differs
    ) -> tuple[int, int]:
        """Check the input, and return its shape (rows, new)."""
        if (tokens is None) == (embeds is None):
            raise InputError("give token ids or embeddings, one of them")
        if tokens is not None:
            if tokens.dim() != 2 or tokens.numel() == 0 or tokens.is_floating_point():
                raise InputError(
                    f"token ids of shape {list(tokens.shape)} can't be read; give whole numbers (rows, columns)"
                )
            least, most = int(tokens.min()), int(tokens.max())
            vocab_size = vocab_size or self.info.vocab_size
            if least < 0 or most >= vocab_size:
                raise InputError(f"token ids lie from {least} to {most}; the vocabulary has {vocab_size}")
            return tokens.shape[0], tokens.shape[1]
        assert embeds is not None
        if embeds.dim() != 3 or embeds.numel() == 0 or embeds.shape[2] != width:
            raise InputError(f"embeddings of shape {list(embeds.shape)} can't be read; give (rows, columns, {width})")
        return embeds.shape[0], embeds.shape[1]


def take_last(states: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
    """The states of each row's last real position (rows, hidden)."""
    num_new = states.shape[1]
    if counts is None or all(count == num_new for count in counts):
        return states[:, -1]
    last = torch.tensor([max(count - 1, 0) for count in counts], device=states.device)
    return states[torch.arange(len(counts), device=states.device), last]
