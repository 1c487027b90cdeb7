"""A transformers object run natively: a native model over the object's own parameters, kept as long as they are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unspool.errors import UnspoolError
from unspool.models.adapters.adapted import set_evaluating
from unspool.models.adapters.kept import find_kept
from unspool.models.adapters.modules import walk_decoder
from unspool.models.adapters.numbers import Numbers, find_room
from unspool.models.adapters.structure import Structure, explain_context, explain_tensors
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.families.base import DecoderFamily
from unspool.models.families.mamba import MambaFamily
from unspool.models.families.mamba2 import Mamba2Family
from unspool.models.families.pair import PairFamily
from unspool.models.families.pictures import PictureFamily, name_language
from unspool.models.mamba.model import Mamba
from unspool.models.native import NativeModel
from unspool.models.registry import build_model, find_family
from unspool.models.sharing import SharedSource
from unspool.protocols import Want

# By how much the highest logit's size they may differ.
_MOST_DIFFERENT = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class Twin:
    """A native model, or why there is none, and what the object was when that was found out."""

    def __init__(self, model: nn.Module) -> None:
        self.structure = Structure(model)
        self.native: NativeModel | None = None
        self.reason = ""
        self._numbers: Numbers | None = None
        self.build(model)

    def build(self, model: nn.Module) -> None:
        """Make the native model of the object's present numbers."""
        self.native, self.reason, self._numbers = None, self.structure.reason, None
        if not self.reason:
            source = SharedSource(_list_held(model), room=find_room(next(model.parameters()).device))
            self.native, self.reason = _build(model, source)
            self._numbers = Numbers(model, source)

    def has_same_numbers(self) -> bool:
        """Whether no number was written or exchanged since."""
        return self._numbers is None or self._numbers.are_same()


@dataclass(frozen=True, slots=True)
class TwinAnswer:
    """The native model over an object's parameters; or None, and why there is none."""

    native: NativeModel | None
    reason: str = ""
    is_changed: bool = False  # the reason is that the object, or what is around the call, is not as its class says


def find_twin(model: Any) -> tuple[NativeModel | None, str]:
    """The native model over an object's parameters; or None, and why there is none."""
    found = ask_twin(model)
    return found.native, found.reason


def ask_twin(model: Any) -> TwinAnswer:
    """The native model over an object's parameters, built once, if the object is what its class says."""
    reason = _explain(model)
    if reason:
        drop_twin(model)
        return TwinAnswer(None, reason)
    reason = explain_context(model)  # which may be over after this call
    if reason:
        return TwinAnswer(None, reason, is_changed=True)
    kept = find_kept(model)
    known: Twin | None = kept.get("native")
    if known is None or not known.structure.is_current(model):
        drop_twin(model)
        known = kept["native"] = Twin(model)
    elif not known.has_same_numbers():
        known.build(model)
    reason = known.reason or known.structure.explain_mode(model)
    return TwinAnswer(None, reason, is_changed=True) if reason else TwinAnswer(known.native)


def explain_change(model: Any) -> str:
    """What of an object, or around the call, is not as its class says; empty if nothing is, or that is not known."""
    if _explain(model):
        return ""
    reason = explain_context(model)
    if reason:
        return reason
    kept = find_kept(model)
    twin: Twin | None = kept.get("native")
    known: Structure | None = kept.get("structure") if twin is None else twin.structure
    if known is None or not known.is_current(model):
        known = kept["structure"] = Structure(model)
    return known.reason or known.explain_mode(model)


def keeps_states(model: Any) -> bool:
    """Whether an object's native model keeps states instead of keys."""
    return isinstance(find_family({"architectures": [type(model).__name__]}), MambaFamily | Mamba2Family)


def prepare_twin(model: Any) -> None:
    """Start compiling the kernels of an object that will run natively on a GPU."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda" or "native" in find_kept(model) or _explain(model):
        return
    config = _read_config(model)
    family = find_family(config)
    assert family is not None
    with suppress(UnspoolError):  # the first call says what can't be
        family.prepare(config, SharedSource(_list_held(model)), parameter.device, parameter.dtype)


def _read_config(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def _list_held(model: nn.Module) -> dict[str, Any]:
    """What an object's file would hold of what is run natively: its parameters, a tied one once, and biases that are
    not trained."""
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    held = {**dict(model.named_parameters()), **buffers}
    if not isinstance(find_family({"architectures": [type(model).__name__]}), PictureFamily):
        return held
    return {alone: held[name] for alone, name in name_language(held).items()}


@torch.inference_mode(False)  # what is made here outlives a call in that mode
@torch.no_grad()  # parameters ask for gradients, which what is made of them must not carry
def _build(model: Any, source: SharedSource) -> tuple[NativeModel | None, str]:
    parameter = next(model.parameters())
    config = _read_config(model)
    try:
        native = build_model(config, source, device=parameter.device, dtype=parameter.dtype)
    except UnspoolError as error:
        return None, f"it can't be run natively: {' '.join(str(error).split())[:200]}"
    if not _agree(model, native):
        return None, "its own forward gives other logits than the native model"
    return native, ""


@torch.no_grad()
def _agree(model: Any, native: NativeModel) -> bool:
    """Whether both give the same logits for a few tokens: a module's settings may have been changed by hand.

    They lie all over the vocabulary: after its first ones, which few texts have, rounding to 16 bits alone may change
    logits by a third.
    """
    tokens = torch.arange(1, 7, device=native.device)[None] * native.info.vocab_size // 7
    with set_evaluating(model):
        if isinstance(native, Mamba):
            return _agree_by_blocks(model, native, tokens)
        if isinstance(native, EncoderDecoder):
            expected, found = _read_pair(model, native, tokens)
        else:
            expected = model(tokens, use_cache=False, return_dict=True).logits.float()
            found = native.forward(tokens, native.new_cache(), want=Want("all")).logits.float()
    return _is_near(found, expected, native.dtype)


def _is_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    most = _MOST_DIFFERENT[dtype] * float(expected.abs().amax().clamp(min=1e-6))
    return bool(((found - expected).abs() <= most).all())


def _agree_by_blocks(model: Any, native: Mamba, tokens: torch.Tensor) -> bool:
    """`_agree`, with every block of the native model reading what the object's block before it made.

    The object's own scan rounds time steps and states to 16 bits, which the next blocks can enlarge to anything.
    """
    made = model(tokens, use_cache=False, output_hidden_states=True, return_dict=True)
    *given, _ = made.hidden_states
    found, logits = native.follow(tokens, given)
    before = [native.get_input_embeddings()(tokens), *given]
    for its, theirs, x in zip(found, given, before, strict=False):
        added = float((theirs.float() - x.float()).abs().amax())
        rounded = torch.finfo(theirs.dtype).eps * float(theirs.abs().amax())
        if not float((its.float() - theirs.float()).abs().amax()) <= _MOST_DIFFERENT[native.dtype] * added + rounded:
            return False  # or it is NaN
    return _is_near(logits.float(), made.logits.float(), native.dtype)


def _read_pair(model: Any, native: EncoderDecoder, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An object's and the native model's logits after a few tokens, for a source of few tokens or of silence."""
    shape = native.info.features
    if shape is None:
        theirs: dict[str, Any] = {"input_ids": tokens}
        encoded = native.encode(tokens)
    else:
        silence = torch.zeros(1, shape.channels, shape.frames, dtype=native.dtype, device=native.device)
        theirs = {"input_features": silence}
        encoded = native.encode(None, embeds=silence)
    made = model(**theirs, decoder_input_ids=tokens, use_cache=False, return_dict=True).logits.float()
    cache = native.new_cache(encoded=encoded)
    return made, native.forward(tokens, cache, want=Want("all")).logits.float()


def find_turned(core: Any) -> int | None:
    """How many numbers of each key a native model has in another order than transformers; None if it has none."""
    rope = getattr(getattr(core, "spec", None), "rope", None)
    return None if rope is None or rope.is_interleaved else int(rope.width)


def find_copies(core: Any) -> int:
    """How often transformers has each head of a native model's keys in its cache: Falcon's code repeats them first."""
    spec: Any = getattr(core, "spec", None)
    if getattr(spec, "family", "") != "falcon" or not getattr(core.config, "new_decoder_architecture", False):
        return 1
    return int(spec.num_heads // spec.num_kv_heads)


def drop_twin(model: Any) -> None:
    """Forget an object's native model."""
    find_kept(model).pop("native", None)


def _explain(model: Any) -> str:
    """Why an object can't be run natively; empty if it can."""
    kind = type(model)
    config = {"architectures": [kind.__name__]}
    has_native = isinstance(
        find_family(config), DecoderFamily | PairFamily | MambaFamily | Mamba2Family | PictureFamily
    )
    if not kind.__module__.startswith("transformers.models.") or not has_native:
        return f"{kind.__name__} has no native model"
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        return "its weights are quantised"
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None):
        return "it has adapters (PEFT)"
    parts = walk_decoder(model)
    reason = explain_tensors(parts)
    if reason:
        return reason
    held = [one for part in parts.values() for one in part._parameters.values() if one is not None]
    if any(parameter.is_inference() for parameter in held):
        return "its parameters were made in inference mode, in which torch does not count what is written"
    kinds = {(parameter.device, parameter.dtype) for parameter in held}
    if len(kinds) != 1 or next(iter(kinds))[1] not in _MOST_DIFFERENT or next(iter(kinds))[0].type == "meta":
        return "its parameters are of several dtypes or on several devices"
    return ""
