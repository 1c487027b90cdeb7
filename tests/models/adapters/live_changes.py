"""Ways in which a program changes a transformers object between two calls, whatever the object's family is.

Each is a context manager over a model and a generator of random numbers; what reaches beyond the object is undone
behind it. One that a family has nothing for raises `AbsentError`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface


class AbsentError(Exception):
    """The object has nothing that the change could be made to."""


Change = Callable[[Any, torch.Generator], AbstractContextManager[None]]
CHANGES: dict[str, Change] = {}
PREPARED: dict[str, Callable[[Any], Any]] = {}
"""What a change needs done to an object before its first call; the result is kept as the model's `prepared`."""


def change(function: Callable[[Any, torch.Generator], Any]) -> Change:
    """Register a change; one that yields nothing has nothing to undo."""

    @contextmanager
    def applied(model: Any, random: torch.Generator) -> Iterator[None]:
        made = function(model, random)
        if not hasattr(made, "__next__"):
            yield
            return
        next(made)
        try:
            yield
        finally:
            next(made, None)

    CHANGES[function.__name__] = applied
    return applied


# --- finding things ---------------------------------------------------------------------------------------
def noise(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    made = torch.randn(tensor.shape, generator=random) * 0.2 + 0.02
    return made.to(tensor.device, tensor.dtype)


def list_named(model: Any, *parts: str, dims: int | None = None) -> list[nn.Parameter]:
    found = [
        parameter
        for name, parameter in model.named_parameters()
        if (not parts or any(part in name for part in parts)) and (dims is None or parameter.dim() == dims)
    ]
    if not found:
        raise AbsentError
    return found


def list_layers(model: Any) -> nn.ModuleList:
    stack = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    return getattr(stack, next(name for name in ("layers", "h", "block") if hasattr(stack, name)))


def find_holder(model: Any, *names: str) -> tuple[nn.Module, str]:
    """The last part of a model that has an attribute of one of these names."""
    for part in reversed(list(model.modules())):
        for name in names:
            if name in part._modules or name in part.__dict__:
                return part, name
    raise AbsentError


def find_activation(model: Any) -> tuple[nn.Module, str]:
    return find_holder(model, "act_fn", "act", "activation_fn")


def find_attention(model: Any) -> nn.Module:
    for part in list_layers(model)[0].modules():
        if type(part).__name__.endswith("Attention"):
            return part
    raise AbsentError


def find_module(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first tensor is another."""

    def other(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if isinstance(made, tuple):
            return (made[0] * 0.4 + 0.1, *made[1:])
        return made * 0.4 + 0.1

    return other


def wrap_long(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something else to nine tokens and more, which are more than are compared at first."""

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = function(self, *args, **kwargs)
        states = args[0] if args else kwargs["hidden_states"]
        if states.shape[1] < 9:
            return made
        return (made[0] * 0.3 + 0.2, *made[1:]) if isinstance(made, tuple) else made * 0.3 + 0.2

    return other


@contextmanager
def put(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of something that outlives the object."""
    before = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


# --- numbers --------------------------------------------------------------------------------------------
@change
def write_all_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data.add_(noise(parameter, random))


@change
def copy_all_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data + noise(parameter, random))


@change
def write_all_in_place(model: Any, random: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(noise(parameter, random))


@change
def write_rows_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, dims=2):
        parameter.data[1:3] += noise(parameter.data[1:3], random) * 5


@change
def write_a_number_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, dims=2):
        flat = parameter.data.view(-1)
        flat[int(torch.randint(flat.numel(), (), generator=random))] = 3.0


@change
def write_the_last_numbers(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data.view(-1)[-1] = 2.0


@change
def swap_rows(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, dims=2):
        parameter.data[[0, 1]] = parameter.data[[1, 0]].clone()


@change
def flip_signs(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, dims=2):
        parameter.data[::2].neg_()


@change
def write_norms_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, "norm", "ln_"):
        parameter.data.add_(noise(parameter, random) * 3)


@change
def write_one_norm_through_data(model: Any, random: torch.Generator) -> None:
    parameter = list_named(model, "norm", "ln_")[0]
    parameter.data[3] = 2.5


@change
def write_biases_through_data(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, "bias"):
        parameter.data.add_(noise(parameter, random) * 3)


@change
def write_through_numpy(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype == torch.bfloat16:
            raise AbsentError
        held = parameter.detach().numpy()
        held += noise(parameter, random).numpy()


@change
def write_through_memory(model: Any, random: torch.Generator) -> None:
    parameter = list_named(model, "norm", "ln_")[-1].detach()
    if parameter.device.type != "cpu":
        raise AbsentError
    other = (parameter + noise(parameter, random) * 3).contiguous()
    ctypes.memmove(parameter.data_ptr(), other.data_ptr(), other.nbytes)


@change
def write_values_alone(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, "v_proj", ".v.weight", "c_attn", "query_key_value", "qkv_proj"):
        parameter.data.add_(noise(parameter, random))


@change
def write_feeds_alone(model: Any, random: torch.Generator) -> None:
    for parameter in list_named(model, "up_proj", "c_fc", "dense_h_to_4h", "fc1", ".wi", "in_proj"):
        parameter.data.add_(noise(parameter, random))


@change
def write_the_head(model: Any, random: torch.Generator) -> None:
    head = model.get_output_embeddings().weight
    head.data[5] = head.data[5] * 3 + 0.3


@change
def write_the_embeddings(model: Any, random: torch.Generator) -> None:
    table = model.get_input_embeddings().weight
    table.data[3:9] += noise(table.data[3:9], random) * 3


@change
def write_in_inference_mode(model: Any, random: torch.Generator) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.add_(noise(parameter, random))


@change
def exchange_parameters(model: Any, random: torch.Generator) -> None:
    for part in list(model.modules()):
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.dim() == 1:
                setattr(part, name, nn.Parameter(parameter.detach() + noise(parameter, random) * 2))


@change
def exchange_memory(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + noise(parameter, random)


@change
def swap_with_averages(model: Any, random: torch.Generator) -> None:
    for parameter in model.parameters():
        average = parameter.data * 0.7 + noise(parameter, random)
        held = parameter.data.clone()
        parameter.data.copy_(average)
        average.copy_(held)


@change
def load_a_state(model: Any, random: torch.Generator) -> None:
    state = {name: value + noise(value, random) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@change
def write_a_state_that_was_taken_before(model: Any, random: torch.Generator) -> None:
    for value in model.__dict__["prepared"].values():
        value.copy_(value + noise(value, random))


PREPARED["write_a_state_that_was_taken_before"] = lambda model: model.state_dict()


def _lay_flat(model: Any) -> torch.Tensor:
    held = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in held])
    first = 0
    for parameter in held:
        parameter.data = flat[first : first + parameter.numel()].view(parameter.shape)
        first += parameter.numel()
    return flat


@change
def write_a_flat_buffer(model: Any, random: torch.Generator) -> None:
    flat = model.__dict__["prepared"]
    flat.add_(noise(flat, random))


PREPARED["write_a_flat_buffer"] = _lay_flat


def _share(model: Any) -> Any:
    other = copy.deepcopy(model)
    for one, theirs in zip(other.parameters(), model.parameters(), strict=True):
        one.data = theirs.data
    return (other,)  # a module would be a part of the model


@change
def write_another_model_of_the_same_memory(model: Any, random: torch.Generator) -> None:
    for parameter in model.__dict__["prepared"][0].parameters():
        parameter.data.add_(noise(parameter, random))


PREPARED["write_another_model_of_the_same_memory"] = _share


def _share_memory(model: Any) -> Any:
    model.share_memory()
    return [parameter.detach() for parameter in model.parameters()]


@change
def write_shared_memory(model: Any, random: torch.Generator) -> None:
    for view in model.__dict__["prepared"]:
        view.add_(noise(view, random))


PREPARED["write_shared_memory"] = _share_memory


@change
def take_an_optimizer_step(model: Any, random: torch.Generator) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = noise(parameter, random)
    optimizer.step()
    optimizer.zero_grad()


@change
def write_many_at_once(model: Any, random: torch.Generator) -> None:
    torch._foreach_add_([one.data for one in model.parameters()], [noise(one, random) for one in model.parameters()])


@change
def write_a_vector(model: Any, random: torch.Generator) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector + noise(vector, random), model.parameters())


@change
def write_buffers_through_data(model: Any, random: torch.Generator) -> None:
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not found:
        raise AbsentError
    for buffer in found:
        buffer.data.mul_(1.7)


@change
def exchange_buffers(model: Any, random: torch.Generator) -> None:
    part, name = next(
        ((part, name) for part in model.modules() for name in part._buffers if name == "inv_freq"), (None, "")
    )
    if part is None:
        raise AbsentError
    setattr(part, name, part._buffers[name] * 0.3)


@change
def round_to_half_and_back(model: Any, random: torch.Generator) -> None:
    dtype = model.dtype
    model.half().to(dtype)


@change
def move_the_tied_head(model: Any, random: torch.Generator) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach() + noise(head.weight, random))


@change
def tie_the_head(model: Any, random: torch.Generator) -> None:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight or head.weight.shape != table.weight.shape:
        raise AbsentError
    head.weight = table.weight


# --- modules and attributes --------------------------------------------------------------------------
@change
def exchange_an_activation(model: Any, random: torch.Generator) -> None:
    part, name = find_activation(model)
    if name in part._modules:
        setattr(part, name, nn.Tanh())
    else:
        setattr(part, name, torch.tanh)


@change
def exchange_all_activations(model: Any, random: torch.Generator) -> None:
    _, name = find_activation(model)
    for part in list(model.modules()):
        if name in part._modules:
            setattr(part, name, nn.Tanh())
        elif name in part.__dict__:
            setattr(part, name, torch.tanh)


@change
def exchange_the_function_of_an_activation(model: Any, random: torch.Generator) -> None:
    part, name = find_activation(model)
    activation = getattr(part, name)
    if not isinstance(activation, nn.Module):
        raise AbsentError
    activation.forward = wrap(activation.forward)


@change
def put_an_activation_behind_the_head(model: Any, random: torch.Generator) -> None:
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings(), nn.Tanh()))


@change
def put_an_activation_behind_a_norm(model: Any, random: torch.Generator) -> None:
    for part in list_layers(model)[0].modules():
        for name, inner in list(part._modules.items()):
            if inner is not None and "norm" in type(inner).__name__.lower():
                setattr(part, name, nn.Sequential(inner, nn.Tanh()))
                return
    raise AbsentError


def _flip(model: Any, kind: type, flip: Callable[[Any], Any]) -> None:
    found = 0
    for part in model.modules():
        for name, value in list(part.__dict__.items()):
            if type(value) is kind and not name.startswith("_") and name not in ("training", "gradient_checkpointing"):
                part.__dict__[name] = flip(value)
                found += 1
    if not found:
        raise AbsentError


@change
def flip_truth_values(model: Any, random: torch.Generator) -> None:
    _flip(model, bool, lambda value: not value)


@change
def flip_causality(model: Any, random: torch.Generator) -> None:
    for layer in list_layers(model):
        for part in layer.modules():
            if "is_causal" in part.__dict__:
                part.is_causal = not part.is_causal


@change
def change_texts(model: Any, random: torch.Generator) -> None:
    _flip(model, str, lambda value: {"sliding_attention": "full_attention"}.get(value, value + "x"))


@change
def change_fractions(model: Any, random: torch.Generator) -> None:
    _flip(model, float, lambda value: value * 3 + 0.01)


@change
def change_a_norm_s_smallest_number(model: Any, random: torch.Generator) -> None:
    for part in model.modules():
        for name in ("eps", "variance_epsilon"):
            if name in part.__dict__:
                part.__dict__[name] = 1.5


@change
def change_the_scale_of_attention(model: Any, random: torch.Generator) -> None:
    part, name = find_holder(model, "scaling", "scale_attn", "norm_factor")
    setattr(part, name, getattr(part, name) * 3)


@change
def change_the_scale_of_rotations(model: Any, random: torch.Generator) -> None:
    part, name = find_holder(model, "attention_scaling")
    setattr(part, name, 1.8)


@change
def reverse_the_layers(model: Any, random: torch.Generator) -> None:
    layers = list_layers(model)
    layers._modules.update({str(place): layer for place, layer in enumerate(reversed(list(layers)))})


@change
def put_a_layer_of_a_copy(model: Any, random: torch.Generator) -> None:
    layers = list_layers(model)
    layers[1] = copy.deepcopy(layers[0])
    for part in layers[1].modules():
        if "layer_idx" in part.__dict__:
            part.layer_idx = 1


@change
def change_a_class_of_a_part(model: Any, random: torch.Generator) -> None:
    part = next(part for part in list_layers(model)[0].modules() if "norm" in type(part).__name__.lower())
    part.__class__ = type(type(part).__name__, (type(part),), {"forward": wrap(type(part).forward)})


@change
def change_the_class(model: Any, random: torch.Generator) -> None:
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = kind.forward(self, *args, **kwargs)
        made.logits = made.logits.flip(-1)
        return made

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@change
def change_the_config(model: Any, random: torch.Generator) -> None:
    config = model.config
    for name in ("final_logit_softcapping", "sliding_window", "attn_logit_softcapping"):
        if getattr(config, name, None):
            setattr(config, name, 3 if name == "sliding_window" else 0.5)


# --- hooks and modes -------------------------------------------------------------------------------------
@change
def register_a_hook(model: Any, random: torch.Generator) -> None:
    list_layers(model)[1].register_forward_hook(
        lambda _m, _i, made: (made[0] * 0.5, *made[1:]) if isinstance(made, tuple) else made * 0.5
    )


@change
def register_a_hook_before(model: Any, random: torch.Generator) -> None:
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, given: (given[0].flip(-1), *given[1:]))


@change
def register_a_hook_for_all_modules(model: Any, random: torch.Generator) -> Iterator[None]:
    handle = torch_module.register_module_forward_hook(
        lambda part, _i, made: made.flip(-1) if part is model.get_output_embeddings() else None
    )
    yield
    handle.remove()


@change
def register_a_hook_before_all_modules(model: Any, random: torch.Generator) -> Iterator[None]:
    handle = torch_module.register_module_forward_pre_hook(
        lambda part, given: (given[0].flip(-1), *given[1:]) if part is model.get_output_embeddings() else None
    )
    yield
    handle.remove()


@change
def enter_autocast(model: Any, random: torch.Generator) -> Iterator[None]:
    with torch.autocast(model.device.type, dtype=torch.float16 if model.dtype == torch.bfloat16 else torch.bfloat16):
        yield


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.5 if func in (F.linear, torch.addmm) else made


@change
def enter_a_mode_of_torch(model: Any, random: torch.Generator) -> Iterator[None]:
    with _Doubling():
        yield


@change
def parametrize_a_matrix(model: Any, random: torch.Generator) -> None:
    class Flipped(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given.flip(0)

    part = next(part for part in list_layers(model)[0].modules() if "weight" in part._parameters)
    nn.utils.parametrize.register_parametrization(part, "weight", Flipped())


# --- code --------------------------------------------------------------------------------------------------
@change
def replace_forward_of_an_object(model: Any, random: torch.Generator) -> None:
    attention = find_attention(model)
    attention.forward = wrap(attention.forward)


@change
def replace_forward_of_the_class_of_attention(model: Any, random: torch.Generator) -> Iterator[None]:
    kind = type(find_attention(model))
    with put(kind, "forward", wrap(kind.forward)):
        yield


@change
def replace_forward_and_wrap_it(model: Any, random: torch.Generator) -> Iterator[None]:
    kind = type(find_attention(model))
    with put(kind, "forward", functools.wraps(kind.forward)(wrap(kind.forward))):
        yield


@change
def replace_attention_beyond_some_tokens(model: Any, random: torch.Generator) -> Iterator[None]:
    kind = type(find_attention(model))
    with put(kind, "forward", wrap_long(kind.forward)):
        yield


@change
def replace_forward_of_the_head_s_class(model: Any, random: torch.Generator) -> Iterator[None]:
    with put(nn.Linear, "forward", wrap(nn.Linear.forward)):
        yield


@change
def replace_forward_of_the_stack(model: Any, random: torch.Generator) -> Iterator[None]:
    kind = type(list_layers(model)[0])
    with put(kind, "forward", wrap(kind.forward)):
        yield


@change
def put_a_call_into_a_class(model: Any, random: torch.Generator) -> Iterator[None]:
    kind = type(find_attention(model))
    kind.__call__ = wrap(nn.Module.__call__)
    yield
    del kind.__call__


@change
def put_a_property_into_a_class(model: Any, random: torch.Generator) -> Iterator[None]:
    part, name = find_holder(model, "scaling")
    kind, value = type(part), part.__dict__[name]
    if name in vars(kind):
        raise AbsentError
    setattr(kind, name, property(lambda self: value * 2))
    yield
    delattr(kind, name)


@change
def replace_a_function_s_code(model: Any, random: torch.Generator) -> Iterator[None]:
    module = find_module(model)
    function = vars(module).get("rotate_half")
    if function is None:
        raise AbsentError

    def other(x: Any) -> Any:
        return -x

    before = function.__code__
    function.__code__ = other.__code__
    yield
    function.__code__ = before


@change
def replace_the_rotation(model: Any, random: torch.Generator) -> Iterator[None]:
    module = find_module(model)
    if "apply_rotary_pos_emb" not in vars(module):
        raise AbsentError
    with put(module, "apply_rotary_pos_emb", wrap(module.apply_rotary_pos_emb)):
        yield


@change
def replace_the_making_of_masks(model: Any, random: torch.Generator) -> Iterator[None]:
    module = find_module(model)
    if "create_causal_mask" not in vars(module):
        raise AbsentError
    made = module.create_causal_mask

    def other(*args: Any, **kwargs: Any) -> Any:
        mask = made(*args, **kwargs)
        return mask if mask is None or mask.dtype != torch.bool else mask & True

    def nearest(*args: Any, **kwargs: Any) -> Any:
        mask = other(*args, **kwargs)
        if isinstance(mask, torch.Tensor) and mask.shape[-1] > 2:
            mask = mask.clone()
            mask[..., 0] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask

    with put(module, "create_causal_mask", nearest):
        yield


@change
def replace_a_function_of_torch(model: Any, random: torch.Generator) -> Iterator[None]:
    with put(F, "scaled_dot_product_attention", wrap(F.scaled_dot_product_attention)):
        yield


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    sdpa = AttentionInterface._global_mapping["_kept_sdpa"]
    made, weights = sdpa(module, query, key, value, attention_mask, **kwargs)
    return (made * 0.3 if query.shape[2] > 8 else made), weights


def _can_choose(model: Any) -> None:
    if "ALL_ATTENTION_FUNCTIONS" not in vars(find_module(model)):
        raise AbsentError


@change
def register_an_attention(model: Any, random: torch.Generator) -> Iterator[None]:
    _can_choose(model)
    table = AttentionInterface._global_mapping
    table["_kept_sdpa"] = table["sdpa"]
    AttentionInterface.register("my_attention", _attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("my_attention")
    yield
    model.set_attn_implementation(before)
    table.pop("my_attention", None)  # another change of the same kind may have taken them away
    table.pop("_kept_sdpa", None)


@change
def register_an_attention_in_the_place_of_sdpa(model: Any, random: torch.Generator) -> Iterator[None]:
    _can_choose(model)
    table = AttentionInterface._global_mapping
    before = table["_kept_sdpa"] = table["sdpa"]
    AttentionInterface.register("sdpa", _attend)
    yield
    table["sdpa"] = before
    del table["_kept_sdpa"]


# --- tensors that are no plain memory -------------------------------------------------------------------
class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantisers make them: it is computed when it is read."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=False
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def open_(one: Any) -> Any:
            return one.inner * 0.5 if isinstance(one, cls) else one

        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*torch.utils._pytree.tree_map(open_, args), **torch.utils._pytree.tree_map(open_, kwargs or {}))


@change
def wrap_matrices(model: Any, random: torch.Generator) -> None:
    for layer in list_layers(model):
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(Wrapped(part.weight.detach()), requires_grad=False)


@change
def wrap_the_first_parameter(model: Any, random: torch.Generator) -> None:
    part = next((part for part in list_layers(model)[0].modules() if isinstance(part, nn.Linear)), None)
    if part is None:
        raise AbsentError
    part.weight = nn.Parameter(Wrapped(part.weight.detach()), requires_grad=False)
