# Made by tools/make_stubs.py.
from unspool.stopping.base import StoppingCriteria as StoppingCriteria
from unspool.stopping.eos import EosTokenCriteria as EosTokenCriteria
from unspool.stopping.length import MaxLengthCriteria as MaxLengthCriteria
from unspool.stopping.lists import StoppingCriteriaList as StoppingCriteriaList
from unspool.stopping.lists import as_criteria_list as as_criteria_list
from unspool.stopping.lists import as_row_flags as as_row_flags
from unspool.stopping.lists import validate_stopping_criteria as validate_stopping_criteria
from unspool.stopping.repeats import RepeatCriteria as RepeatCriteria
from unspool.stopping.strings import StopStringCriteria as StopStringCriteria
from unspool.stopping.time import MaxTimeCriteria as MaxTimeCriteria

__all__ = [
    "EosTokenCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "RepeatCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "as_criteria_list",
    "as_row_flags",
    "validate_stopping_criteria",
]
