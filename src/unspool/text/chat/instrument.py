"""Rewriting a chat template's tree so that what it runs and what it makes is paid for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.visitor

from unspool.text.chat.budget import Counted, check_text_size, current_budget

# Names that no template can spell, for the filters that `instrument` puts in.
_COUNTED, _CHARGED, _MEASURED, _CONCATENATED = (f"unspool {name}" for name in ("loop", "body", "literal", "~"))


def instrument(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> jinja2.nodes.Template:
    """The tree with a price on every loop, macro, literal and `~`, ready to be compiled."""
    _Instrument().visit(tree)
    tree.set_environment(environment)
    return tree


class _Instrument(jinja2.visitor.NodeTransformer):
    """Wraps the nodes that jinja2's sandbox does not ask about. What a body costs is the number of its nodes."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def generic_visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> jinja2.nodes.Node:
        self._num_nodes += 1
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        cost = self._visit_and_count(node)
        node.iter = _apply(cast(jinja2.nodes.Expr, node.iter), _COUNTED, jinja2.nodes.Const(cost))
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._charge_body(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._charge_body(node)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply(node, _MEASURED)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply(node, _MEASURED)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply(node, _MEASURED) if node.ctx == "load" else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply(jinja2.nodes.List(node.nodes, lineno=node.lineno), _CONCATENATED)

    def _charge_body(self, node: jinja2.nodes.Macro | jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        cost = jinja2.nodes.Const(self._visit_and_count(node), lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(_apply(cost, _CHARGED), lineno=node.lineno))
        return node

    def _visit_and_count(self, node: jinja2.nodes.Node) -> int:
        before = self._num_nodes
        self.generic_visit(node)
        return self._num_nodes - before


def _apply(node: jinja2.nodes.Expr, name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _charge_body(cost: int) -> str:
    current_budget().charge(cost)
    return ""


def _measure_literal(value: Any) -> Any:
    current_budget().charge_value(value)
    return value


def _concatenate(values: list[Any]) -> str:
    current_budget().charge_value(values)
    return join_output(str(value) for value in values)


def join_output(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        check_text_size(size)
        kept.append(piece)
    text = "".join(kept)
    current_budget().charge_value(text)
    return text


# What the instrumented nodes call.
INSTRUMENT_FILTERS: Mapping[str, Callable[..., Any]] = {
    _COUNTED: Counted,
    _CHARGED: _charge_body,
    _MEASURED: _measure_literal,
    _CONCATENATED: _concatenate,
}
