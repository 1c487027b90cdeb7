"""Recorded answers of the package llmlingua, with the tiny models that gave them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from unspool import PromptCompressor

GOLDENS = Path(__file__).parent / "goldens"
REFUSED = {
    "v2_bert_rate_above_one": "rate",
    "v2_xlmr_rate_above_one": "rate",
    "error_rate_negative": "rate",
    "error_budget_expression": "context_budget",
    "error_force_id_out_of_range": "force_context_ids",
}
ANSWERED = ("json_tuple", "error_json_quotes", "error_v2_path")
CHANGED = ("json_numbers",)


@dataclass(frozen=True)
class Case:
    """A call, and the result or the error that the package gave."""

    name: str
    model: str
    constructor: dict[str, Any]
    method: str
    args: dict[str, Any]
    result: Any
    error: dict[str, str] | None

    def __str__(self) -> str:
        return self.name


def read_cases() -> list[Case]:
    listed = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))
    return [
        Case(
            one["id"], one["model"], one["constructor"], one["method"], one["args"], one.get("result"), one.get("error")
        )
        for one in listed
    ]


def run_case(case: Case) -> Any:
    args = {name: _find_file(value) for name, value in case.args.items()}
    return getattr(_load(case.model, json.dumps(case.constructor)), case.method)(**args)


def _find_file(value: Any) -> Any:
    is_file = isinstance(value, dict) and "$file" in value
    return str(GOLDENS / "record.yaml") if is_file else value


@lru_cache
def _load(model: str, constructor: str) -> PromptCompressor:
    arguments = json.loads(constructor)
    arguments.pop("folder_name", None)
    return PromptCompressor(str(GOLDENS / "models" / model), "cpu", **arguments)
