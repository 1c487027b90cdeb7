"""The processors that shape what is drawn from, in their order: part of the table of `order`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from unspool.config.parameter import LARGEST_COUNT, Parameter, make_number
from unspool.logits.entry import ProcessorEntry

if TYPE_CHECKING:
    from unspool.logits.building import Build


def _cut(processor: Any, build: Build) -> Any:
    """Made from its setting, and cutting no deeper than beams can bear."""
    return processor(build.value, min_tokens_to_keep=build.fewest)


def _make_dynamic_temperature(processor: Any, build: Build) -> Any:
    temperature = 1.0 if build.settings.temperature is None else build.get("temperature")
    return processor(temperature, build.value, build.get("dynatemp_exponent"))


def _number(name: str, default: float | None, text: str, **more: Any) -> Parameter:
    return make_number(name, default, "sampling", text, per_row=True, **more)


def _own(name: str, default: float | None, text: str, **more: Any) -> Parameter:
    return _number(name, default, text, is_ours=True, **more)


def _warper(home: str, *parameters: Parameter, **more: Any) -> ProcessorEntry:
    return ProcessorEntry(processor=f"unspool.logits.{home}", parameters=parameters, stage="sampling", **more)


SAMPLING: Final[tuple[ProcessorEntry, ...]] = (
    _warper(
        "temperature:TemperatureLogitsWarper",
        _number("temperature", 1.0, "Above 1 flattens the distribution, below 1 sharpens it.", off=(1.0,)),
        unless="dynatemp_range",
    ),
    _warper(
        "temperature:DynamicTemperatureLogitsWarper",
        _own("dynatemp_range", 0.0, "How far temperature moves with the entropy; 0 is off.", off=(0.0,)),
        _own("dynatemp_exponent", 1.0, "Power of the entropy in dynamic temperature."),
        make=_make_dynamic_temperature,
        also=("temperature",),
    ),
    _warper(
        "truncation:TopNSigmaLogitsWarper",
        _own("top_n_sigma", None, "Keep scores within so many deviations of the highest."),
    ),
    _warper(
        "typicality:TopHLogitsWarper",
        _own("top_h", None, "Keep the likeliest tokens that hold this share of the entropy."),
    ),
    _warper(
        "truncation:TopKLogitsWarper",
        Parameter(
            "top_k",
            50,
            "integer",
            "sampling",
            "Keep the k likeliest tokens; 0 keeps all.",
            at_least=0,
            at_most=LARGEST_COUNT,
            may_be_per_row=True,
            off=(0,),
            needs=("do_sample", "penalty_alpha"),
        ),
        make=_cut,
    ),
    _warper(
        "truncation:TopPLogitsWarper",
        _number("top_p", 1.0, "Keep the likeliest tokens that hold this much probability.", off=(1.0,)),
        make=_cut,
    ),
    _warper(
        "truncation:MinPLogitsWarper",
        _number("min_p", None, "Keep tokens at least this likely, relative to the likeliest."),
        make=_cut,
    ),
    _warper(
        "truncation:TopALogitsWarper",
        _own("top_a", 0.0, "Keep tokens this likely, relative to the likeliest's square.", off=(0.0,)),
    ),
    _warper(
        "typicality:TypicalLogitsWarper",
        _number("typical_p", 1.0, "Keep the most typical tokens that hold this much probability.", off=(1.0,)),
        make=_cut,
    ),
    _warper(
        "typicality:EpsilonLogitsWarper",
        _number("epsilon_cutoff", 0.0, "Keep tokens with at least this probability.", off=(0.0,)),
        make=_cut,
    ),
    _warper(
        "typicality:EtaLogitsWarper",
        _number("eta_cutoff", 0.0, "Keep tokens above a floor that follows the entropy.", off=(0.0,)),
        make=_cut,
    ),
    _warper(
        "exclusion:XTCLogitsWarper",
        _own("xtc_probability", 0.0, "How often the likeliest tokens are left out; 0 is off.", off=(0.0,)),
        _own("xtc_threshold", 0.1, "Probability from which XTC may leave a token out."),
        make=lambda kind, build: kind(build.value, build.get("xtc_threshold")),
    ),
    _warper(
        "mirostat:MirostatLogitsWarper",
        _own("mirostat_tau", None, "Surprise, in bits, that Mirostat steers towards."),
        _own("mirostat_eta", 0.1, "How fast Mirostat steers."),
        make=lambda kind, build: kind(build.value, build.get("mirostat_eta")),
    ),
)
