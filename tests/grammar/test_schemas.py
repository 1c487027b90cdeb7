"""A hundred schemas are compiled, and documents of some are written and validated."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tests.grammar.schemas import SCHEMAS
from tests.grammar.tiny import load_tiny, make_tokenizer
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary


def test_there_are_a_hundred_schemas() -> None:
    assert len(SCHEMAS) == 100
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_kept(name: str) -> None:
    """Compiled, and walked along by the first, the last and a middle allowed token until a document is whole."""
    schema: Any = SCHEMAS[name]
    source = read_source("json_schema", schema)
    assert source is not None
    grammar = compile_grammar(source, find_vocabulary(make_tokenizer(), 160))
    assert not grammar.start().is_error()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 8}])
def test_short_documents_are_valid(settings: dict[str, Any]) -> None:
    lm = load_tiny("llama")
    names = ["boolean", "integer", "const object", "enum mixed", "date", "uuid", "prefix items", "optional", "tree"]
    schemas = [SCHEMAS[name] for name in names]
    found = lm.generate([[5, 6]] * len(names), json_schema=schemas, max_new_tokens=110, eos_token_id=2, **settings)
    num_valid = 0
    for row, schema in enumerate(schemas):
        if found.finish_reasons[row] == "eos":
            jsonschema.validate(found.parse(row), schema)
            num_valid += 1
    assert num_valid >= 5
