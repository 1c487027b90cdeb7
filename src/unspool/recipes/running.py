"""Loading a recipe's function, once its code may run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from unspool.errors import LoadError, SettingError, UnspoolError, excerpt
from unspool.recipes.finding import RecipeFiles, describe_code, find_recipe
from unspool.recipes.importing import import_recipe
from unspool.recipes.requirements import check_requirements

Function = Callable[..., Any]


def load_recipe(recipe: Any, *, trusts: bool = False, revision: str | None = None) -> Function:
    """The function of a recipe: a callable as it is, or the `generate` of a folder or hub id that is trusted.

    `RecipeFiles`, which `find_recipe` has read, stand for their folder as it was then.
    """
    if callable(recipe):
        if revision is not None:
            raise SettingError("`revision` is for recipes from the hub, and this one is a function; leave it out")
        return _check_function(recipe, getattr(recipe, "__name__", "the function"))
    if isinstance(recipe, RecipeFiles):
        return _load_files(recipe, trusts)
    if not isinstance(recipe, str) and not hasattr(recipe, "__fspath__"):
        raise SettingError(
            f"custom_generate={excerpt(recipe)} is no recipe; give a folder, a hub id (owner/name), the name of a "
            "shipped recipe, or a function"
        )
    return _load_files(find_recipe(recipe, revision), trusts)


def _load_files(files: RecipeFiles, trusts: bool) -> Function:
    check_source(files)
    if not trusts and not files.is_shipped:
        raise SettingError(
            f"the recipe {files.name!r:.120} is code, and runs with trust_remote_code=True only. It would run "
            f"{describe_code(files)}"
        )
    check_requirements(files.requirements, files.name)
    return _check_function(_execute(files), str(files.script))


def check_source(files: RecipeFiles) -> None:
    """Raise if the script can't be parsed, or defines no function `generate`; nothing is run."""
    try:
        tree = ast.parse(files.source, str(files.script))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:  # the last three: nesting
        line = getattr(error, "lineno", None)
        why = excerpt(str(error.args[0]), 300) if error.args else "it nests too deeply"
        raise LoadError(f"{files.script} is not Python: {why}{f' (line {line})' if line else ''}") from error
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    if "generate" not in names:
        raise LoadError(f"{files.script} defines no function `generate`; a recipe is def generate(model, …)")


def _execute(files: RecipeFiles) -> Any:
    """The script's `generate`, from a module that can import the files beside it (`from .helper import …`)."""
    try:
        return getattr(import_recipe(files.snapshot, files.script), "generate", None)
    except UnspoolError:
        raise
    except (Exception, SystemExit) as error:  # whatever somebody's code raises
        raise LoadError(f"{files.script} failed when it was loaded: {type(error).__name__}: {error}") from error


def _check_function(function: Any, where: str) -> Function:
    if not callable(function):
        raise LoadError(f"`generate` of {where} is not a function")
    checked: Function = function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable that has no signature
        return checked
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    if not takes_all and (not parameters or parameters[0].name != "model"):
        raise LoadError(f"the first argument of {where} must be `model`; a recipe is def generate(model, …)")
    return checked
