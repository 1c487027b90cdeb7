"""Rewriting a chat template's tree so that what it runs and what it makes is paid for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.visitor

from unspool.text.chat.budget import Counted, check_key, check_text_size, current_budget, refuse
from unspool.text.chat.formats import Pieces
from unspool.text.chat.writing import to_text

# Compiling takes time by the number of nodes, and by statements times names. The longest templates in use have some
# 3,000 nodes; these bounds keep compiling below two seconds.
MAX_NODES = 12_000
MAX_STATEMENTS = 1_000

# Names that no template can spell, for the filters that `instrument` puts in.
_COUNTED, _CHARGED, _MEASURED, _CONCATENATED, _SLICED, _COMPARED = (
    f"unspool {name}" for name in ("loop", "body", "literal", "~", "slice", "operand")
)

# What a tree may be made of. Inheritance, blocks and imports have no use in a template that stands alone.
_STATEMENTS = (
    *(jinja2.nodes.Assign, jinja2.nodes.AssignBlock, jinja2.nodes.Break, jinja2.nodes.CallBlock),
    *(jinja2.nodes.Continue, jinja2.nodes.FilterBlock, jinja2.nodes.For, jinja2.nodes.If, jinja2.nodes.Macro),
    *(jinja2.nodes.Output, jinja2.nodes.Scope, jinja2.nodes.With),
)
_EXPRESSIONS = (
    *(jinja2.nodes.BinExpr, jinja2.nodes.Call, jinja2.nodes.Compare, jinja2.nodes.Concat, jinja2.nodes.CondExpr),
    *(jinja2.nodes.Const, jinja2.nodes.Dict, jinja2.nodes.Filter, jinja2.nodes.Getattr, jinja2.nodes.Getitem),
    *(jinja2.nodes.List, jinja2.nodes.NSRef, jinja2.nodes.Name, jinja2.nodes.Slice, jinja2.nodes.TemplateData),
    *(jinja2.nodes.Test, jinja2.nodes.Tuple, jinja2.nodes.UnaryExpr),
)
_PARTS = (jinja2.nodes.Keyword, jinja2.nodes.Operand, jinja2.nodes.Pair, jinja2.nodes.Template)


def instrument(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> jinja2.nodes.Template:
    """The tree with a price on every loop, macro, literal, slice, comparison and `~`, ready to be compiled."""
    _check_tree(tree)
    _Instrument().visit(tree)
    tree.set_environment(environment)
    return tree


def _check_tree(tree: jinja2.nodes.Template) -> None:
    """Refuse a tree that takes long to compile, or that has what no chat template needs."""
    num_nodes = num_statements = 0
    pending: list[jinja2.nodes.Node] = [tree]
    while pending:
        node = pending.pop()
        num_nodes += 1
        num_statements += isinstance(node, _STATEMENTS) and not isinstance(node, jinja2.nodes.Output)
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_PARTS)):
            raise refuse(f"it has a {type(node).__name__}, which chat templates may not")
        if num_nodes > MAX_NODES or num_statements > MAX_STATEMENTS:
            raise refuse(f"it has more than {MAX_NODES} parts or {MAX_STATEMENTS} statements")
        pending.extend(node.iter_child_nodes())


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

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        ends = [end or jinja2.nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _apply(node.node, _SLICED, *ends)

    def visit_Operand(self, node: jinja2.nodes.Operand) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _apply(node.expr, _COMPARED)
        return node

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
    if isinstance(value, dict):
        for key in value:
            check_key(key)
    current_budget().charge_value(value)
    return value


def _concatenate(values: list[Any]) -> str:
    pieces = Pieces()
    for value in values:
        pieces.add(to_text(value))
    return pieces.join()


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    if not isinstance(value, str | list | tuple | range):
        raise TypeError(f"{type(value).__name__!r} can't be sliced")
    part = value[start:stop:step]
    current_budget().charge_value(part)
    return part


def _compare(value: Any) -> Any:
    current_budget().charge(1)
    return value


def join_output(pieces: Iterable[str]) -> str:
    """The text of a template's, macro's or block's pieces."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        check_text_size(size)
        kept.append(piece)
    current_budget().charge_text(size)
    return "".join(kept)


# What the instrumented nodes call.
INSTRUMENT_FILTERS: Mapping[str, Callable[..., Any]] = {
    _COUNTED: Counted,
    _CHARGED: _charge_body,
    _MEASURED: _measure_literal,
    _CONCATENATED: _concatenate,
    _SLICED: _slice,
    _COMPARED: _compare,
}
