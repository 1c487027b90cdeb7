"""When a row stops."""

from __future__ import annotations

from unspool.stopping.base import (
    StoppingCriteria,
    StoppingCriteriaList,
    as_criteria_list,
    as_row_flags,
    validate_stopping_criteria,
)
from unspool.stopping.eos import EosTokenCriteria
from unspool.stopping.length import MaxLengthCriteria
from unspool.stopping.strings import StopStringCriteria
from unspool.stopping.time import MaxTimeCriteria

__all__ = [
    "EosTokenCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "as_criteria_list",
    "as_row_flags",
    "validate_stopping_criteria",
]
