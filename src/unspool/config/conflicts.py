"""Settings that can't be combined, whatever the model: tables that a GenerationConfig checks itself."""

from __future__ import annotations

from unspool.config.pairs import ConfigFacts, Method, Pair
from unspool.config.structures import list_structures


def _count_returned(facts: ConfigFacts) -> int:
    given = facts.settings.num_return_sequences
    return 1 if given is None else int(given)


def _asks_groups(facts: ConfigFacts) -> bool:
    has_groups = facts.num_groups != 1 or bool(facts.settings.diversity_penalty)
    return facts.num_beams > 1 and has_groups and not facts.is_constrained


def _suppresses_all(facts: ConfigFacts, name: str) -> bool:
    """Whether every token that a setting forces is suppressed too."""
    given = getattr(facts.settings, name)
    forced = set(given) if isinstance(given, (list, tuple)) else {given}
    return facts.is_on(name) and forced <= set(facts.settings.suppress_tokens)


RETURNED: Method[ConfigFacts] = Method(
    lambda facts: _count_returned(facts) != 1,
    "{why}",
    (
        Pair(
            lambda facts: facts.num_beams == 1 and not facts.settings.do_sample,
            "Greedy methods without beam search do not support {num_return_sequences} different than 1 (got "
            "{settings.num_return_sequences}): all would be the same. Set {do_sample:=True} or {num_beams}.",
        ),
        Pair(
            lambda facts: 1 < facts.num_beams < _count_returned(facts),
            "{num_return_sequences} ({settings.num_return_sequences}) has to be smaller than or equal to {num_beams} "
            "({settings.num_beams}).",
        ),
    ),
)
CONSTRAINED: Method[ConfigFacts] = Method(
    lambda facts: facts.num_beams > 1 and facts.is_constrained,
    "{facts.forced} asks for constrained beam search, {why}, or unset {facts.forced}.",
    (
        Pair("do_sample", "which does not sample: set {do_sample:=False}"),
        Pair("num_beam_groups", "which has no groups: set {num_beam_groups:=1}"),
    ),
)
GROUPS: Method[ConfigFacts] = Method(
    _asks_groups,
    "{num_beam_groups} or {diversity_penalty} asks for group beam search, {why}, or unset both.",
    (
        Pair(
            lambda facts: not facts.settings.diversity_penalty,
            "",
            message="{diversity_penalty} should be greater than 0.0, otherwise the beam groups are identical.",
        ),
        Pair("do_sample", "which does not sample: set {do_sample:=False}"),
    ),
)
CACHE_CONFIG: Method[ConfigFacts] = Method(
    lambda facts: facts.settings.cache_config is not None,
    "{cache_config} is set, but {cache_implementation:is {settings.cache_implementation!r}} has nothing to configure. "
    "Set {cache_implementation} to one of {facts.configurable}, or unset {cache_config}.",
    (Pair(lambda facts: facts.settings.cache_implementation not in facts.configurable, ""),),
)
STRUCTURED: Method[ConfigFacts] = Method(
    lambda facts: bool(list_structures(facts.settings)),
    "{why}",
    (
        Pair(
            lambda facts: len(list_structures(facts.settings)) > 1,
            "{json_schema}, {json_object}, {regex}, {choice}, {grammar} and {structural_tag} each describe the whole "
            "text; set one of them",
        ),
    ),
)
DRAFTER: Method[ConfigFacts] = Method(
    lambda facts: facts.settings.drafter == "grammar",
    "{drafter:is 'grammar'} drafts what a structured text must go on with, and there is none; set {json_schema}, "
    "{regex}, {choice} or {grammar}, or leave it out",
    (Pair(lambda facts: not list_structures(facts.settings), ""),),
)
SUPPRESSED: Method[ConfigFacts] = Method(
    "suppress_tokens",
    "{why}",
    (
        Pair(
            lambda facts: _suppresses_all(facts, "forced_bos_token_id"),
            "{forced_bos_token_id:is {settings.forced_bos_token_id!r}} forces a token that {suppress_tokens} forbids, "
            "so none would be left; take it out of one of them",
        ),
        Pair(
            lambda facts: _suppresses_all(facts, "forced_eos_token_id"),
            "{forced_eos_token_id:is {settings.forced_eos_token_id!r}} forces a token that {suppress_tokens} forbids, "
            "so none would be left; take it out of one of them, and use {min_new_tokens} to keep a text from ending "
            "early",
        ),
    ),
)
OF_CONFIG = (CACHE_CONFIG, RETURNED, CONSTRAINED, GROUPS, STRUCTURED, DRAFTER, SUPPRESSED)
