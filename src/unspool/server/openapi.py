"""`/openapi.json`: the routes and the fields of their bodies, made from the table of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from unspool._version import __version__
from unspool.server.compress_route import describe_compress
from unspool.server.names import CHAT, COMPLETIONS, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, RESPONSES, TRACE

_ERRORS: Final = ("400", "401", "404", "413", "429", "503")
_GETS: Final = {
    "/v1/models": "The served models.",
    "/v1/parameters": "The settings that a request may carry, each with its bounds.",
    "/health": "Whether every engine works.",
    "/ready": "Whether requests are taken.",
    "/version": "The library's version.",
    "/metrics": "Counts and times in Prometheus' format.",
    "/openapi.json": "This page.",
    "/api/tags": "The served models, in Ollama's form.",
    "/api/ps": "The models that are loaded, in Ollama's form.",
    "/api/version": "The library's version, in Ollama's form.",
}


def _small(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"model": {"type": "string"}, **properties},
        "required": [required],
        "additionalProperties": False,
    }


def _describe_questions() -> dict[str, Any]:
    kinds = {"enum": ["choice", "score", "noul"]}
    question = {
        "type": "object",
        "properties": {"type": kinds, "instructions": {}, "criteria": {}},
        "required": ["type"],
    }
    return {
        "type": "object",
        "properties": {
            "model": {"type": "string"},
            "state": {"type": ["string", "object", "array"]},
            "questions": {"type": "object", "additionalProperties": question, "minProperties": 1},
            "instructions": {},
        },
        "required": ["state", "questions"],
        "additionalProperties": False,
    }


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """Ollama's settings stand in an object of their own, or beside the others."""
    properties = {**schema["properties"], "options": {"type": "object"}}
    return {**schema, "properties": properties}


_MESSAGES: Final = {"type": "array", "items": {"type": "object", "required": ["role"]}, "minItems": 1}
_BODIES: Final[Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "/tokenize": (
        "A text's token ids.",
        lambda: _small("prompt", prompt={"type": "string"}, add_special_tokens={"type": "boolean"}),
    ),
    "/detokenize": (
        "The text of token ids.",
        lambda: _small("tokens", tokens={"type": "array", "items": {"type": "integer", "minimum": 0}}),
    ),
    "/apply-template": (
        "The text that a chat template makes of messages.",
        lambda: _small("messages", messages=_MESSAGES),
    ),
    "/v1/chat/completions": ("Answer a conversation.", lambda: CHAT.describe(["messages"])),
    "/v1/completions": ("Continue texts.", lambda: COMPLETIONS.describe(["prompt"])),
    "/v1/responses": ("Answer items, in the form of OpenAI's responses.", lambda: RESPONSES.describe(["input"])),
    "/v1/messages": ("Answer messages, in Anthropic's form.", lambda: MESSAGES.describe(["messages", "max_tokens"])),
    "/v1/trace": ("Follow how one prompt is decoded, as events.", lambda: TRACE.describe([])),
    "/v1/messages/count_tokens": ("Count a message's tokens.", lambda: MESSAGES.describe(["messages"])),
    "/v1/compress": ("Shorten texts, with every token's loss.", describe_compress),
    "/v1/systemone": ("Answer typed questions with probabilities.", _describe_questions),
    "/api/chat": (
        "Answer a conversation, in Ollama's form.",
        lambda: _with_options(OLLAMA_CHAT.describe(["messages"])),
    ),
    "/api/generate": (
        "Answer a prompt, in Ollama's form.",
        lambda: _with_options(OLLAMA_GENERATE.describe(["prompt"])),
    ),
    "/api/show": ("Describe a model, in Ollama's form.", lambda: _small("model")),
}


@lru_cache(maxsize=1)
def describe_routes() -> dict[str, Any]:
    """The page."""
    failures = {code: {"$ref": "#/components/responses/error"} for code in _ERRORS}
    paths: dict[str, Any] = {}
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "OK"}, **failures}}}
    for path, (summary, describe) in _BODIES.items():
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": describe()}}},
                "responses": {"200": {"description": "OK"}, **failures},
            }
        }
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "unspool", "version": __version__},
        "paths": paths,
        "components": {
            "responses": {"error": {"description": "An error.", "content": {"application/json": {"schema": error}}}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
