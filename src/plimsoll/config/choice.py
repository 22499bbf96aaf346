"""From a `Choice` in the config to the function that it names, with its options bound.

A name is a file of a package of Plimsoll's; a name with a colon is an import path. Nothing is
registered anywhere: a new loss, advantage or reward is one new file and one config value.
Options are checked here, before anything runs, against the function's keyword-only parameters;
an annotation such as `Annotated[float, Field(gt=1)]` has its bounds checked too.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from plimsoll.config.base import Choice, OptionValue
from plimsoll.errors import ConfigError

# What importing a user's module raises in practice: it is missing, or its top level is wrong.
_IMPORT_FAILURES = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError)


def resolve_choice(choice: Choice, package: str, function: str) -> functools.partial[Any]:
    """The function that `choice` names, with the choice's options bound.

    package: the dotted package that holds the named files, such as
        `plimsoll.algorithm.policy_loss`.
    function: the name of the one function that each of its files defines, such as `loss`.

    Raises ConfigError for a name, an option or an option's value that cannot be used.
    """
    if ":" in choice.name:
        found = _by_import_path(choice.name)
    else:
        found = _by_name(choice.name, package, function)
    return functools.partial(found, **_checked_options(choice, found))


def positional_parameters(choice: Choice, package: str, function: str) -> tuple[str, ...]:
    """The names of the positional parameters of the function that `choice` names.

    A file of Plimsoll's is read, not imported: it may need torch, and who asks may not.
    Raises ConfigError for a name that cannot be used.
    """
    if ":" in choice.name:
        found = inspect.signature(_by_import_path(choice.name)).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in found if p.kind in kinds)
    spec = find_spec(_known(choice.name, package))
    assert spec is not None and spec.origin is not None
    [definition] = [
        node
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return tuple(p.arg for p in [*definition.args.posonlyargs, *definition.args.args])


def _by_name(name: str, package: str, function: str) -> Callable[..., Any]:
    return _function_of(importlib.import_module(_known(name, package)), function, name)


def _known(name: str, package: str) -> str:
    """The module of a name in a package."""
    kind = package.rpartition(".")[2]
    known = sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__))
    if name not in known:
        raise ConfigError(
            f"No {kind} is called {name!r}.{_nearest(name, known)} Known: {', '.join(known)}. "
            f"A function of your own is chosen by import path: my.module:my_function."
        )
    return f"{package}.{name}"


def _by_import_path(path: str) -> Callable[..., Any]:
    module_name, _, function = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except _IMPORT_FAILURES as error:
        raise ConfigError(
            f"{path!r} cannot be imported: {type(error).__name__}: {error}. Write "
            f"my.module:my_function, and put the folder that holds the module on PYTHONPATH."
        ) from error
    return _function_of(module, function, path)


def _function_of(module: ModuleType, function: str, name: str) -> Callable[..., Any]:
    found: object = vars(module).get(function)
    if callable(found) and inspect.isfunction(inspect.unwrap(found)):
        return found
    if found is not None:
        raise ConfigError(
            f"{name!r} names a {type(found).__name__}, and a Python function is needed. "
            f"Name one that is defined with `def`."
        )
    defined = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise ConfigError(
        f"{name!r}: the module {module.__name__} has no function {function!r}."
        f"{_nearest(function, defined)} It has: {', '.join(sorted(defined)) or 'no function'}."
    )


def _checked_options(choice: Choice, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for name in choice.options:
        if name not in parameters:
            raise ConfigError(
                f"{choice.name!r} has no option {name!r}.{_nearest(name, parameters)} "
                f"Its options: {', '.join(parameters) or 'none'} (the function's keyword-only "
                f"parameters)."
            )
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in choice.options:
            raise ConfigError(f"{choice.name!r} needs the option {name!r}: it has no default.")
    hints = _hints(choice.name, function, parameters.values())
    return {
        name: _checked_value(choice.name, name, value, hints[name])
        for name, value in choice.options.items()
    }


def _hints(
    name: str, function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> dict[str, Any]:
    """The types of the options alone: the other annotations may name what only a type checker
    imports."""
    annotations = {
        p.name: Any if p.annotation is inspect.Parameter.empty else p.annotation for p in parameters
    }
    scope = inspect.unwrap(function).__globals__
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=annotations), globalns=scope, include_extras=True
        )
    except NameError as error:
        raise ConfigError(
            f"{name!r}: the type of an option cannot be read: {error}. Import it at the top of "
            f"the function's module, outside of `if TYPE_CHECKING`."
        ) from error


def _checked_value(choice: str, option: str, value: OptionValue, expected: Any) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(expected)
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        wanted = " or ".join(dict.fromkeys(detail["msg"] for detail in error.errors()))
        raise ConfigError(
            f"The option {option!r} of {choice!r} is {value!r} ({type(value).__name__}). {wanted}."
        ) from error


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
