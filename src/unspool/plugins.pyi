# Made by tools/make_stubs.py.
from unspool.cache.entry import CacheKindEntry as CacheKindEntry
from unspool.config.parameter import Parameter as Parameter
from unspool.config.parameter import make_count as make_count
from unspool.config.parameter import make_flag as make_flag
from unspool.config.parameter import make_number as make_number
from unspool.config.parameter import make_other as make_other
from unspool.config.parameter import make_token as make_token
from unspool.decoding.rows import Rows as Rows
from unspool.decoding.speculative.drafters.base import Draft as Draft
from unspool.decoding.speculative.drafters.base import Drafter as Drafter
from unspool.decoding.speculative.making import DrafterContext as DrafterContext
from unspool.decoding.strategies.token_strategy import StrategyContext as StrategyContext
from unspool.decoding.strategies.token_strategy import TokenStrategy as TokenStrategy
from unspool.grammar.call_forms import CallFormat as CallFormat
from unspool.grammar.call_forms import ParameterFormat as ParameterFormat
from unspool.grammar.tool_kinds import ToolFormatEntry as ToolFormatEntry
from unspool.logits.entry import ProcessorEntry as ProcessorEntry
from unspool.models.families.base import DecoderFamily as DecoderFamily
from unspool.models.families.base import fixed as fixed
from unspool.models.families.entry import FamilyEntry as FamilyEntry
from unspool.plan.drafters import DrafterEntry as DrafterEntry
from unspool.plan.strategies import StrategyEntry as StrategyEntry
from unspool.registry import register as register
from unspool.registry import unregister as unregister
from unspool.stopping.entry import StopContext as StopContext
from unspool.stopping.entry import StopEntry as StopEntry
from unspool.thoughts.entry import ThoughtEntry as ThoughtEntry

__all__ = [
    "CacheKindEntry",
    "CallFormat",
    "DecoderFamily",
    "Draft",
    "Drafter",
    "DrafterContext",
    "DrafterEntry",
    "FamilyEntry",
    "Parameter",
    "ParameterFormat",
    "ProcessorEntry",
    "Rows",
    "StopContext",
    "StopEntry",
    "StrategyContext",
    "StrategyEntry",
    "ThoughtEntry",
    "TokenStrategy",
    "ToolFormatEntry",
    "fixed",
    "make_count",
    "make_flag",
    "make_number",
    "make_other",
    "make_token",
    "register",
    "unregister",
]
