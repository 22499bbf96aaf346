"""Find the function that a `Choice` of the config names, and bind its options.

A name is a function of a file of Plimsoll's, or a file of a package; a name with a colon is one's
own function, in a module or a file (files.py). Nothing is registered anywhere: a new loss,
advantage or reward is one new function and one config value.
Options are checked here, before anything runs, against the function's keyword-only parameters;
an annotation such as `Annotated[float, Field(gt=1)]` has its bounds checked too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from plimsoll.config import base
from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.files import load_named, modules_in, nearest
from plimsoll.errors import ConfigError


def resolve_choice(
    choice: Choice,
    package: str,
    function: str | None = None,
    arguments: int = 1,
    *,
    awaited: bool = False,
    adapted: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda own: own,
) -> functools.partial[Any]:
    """Return the function that `choice` names, with the choice's options bound.

    Args:
        choice: name and options, as the config has them.
        package: the dotted name of the file that has the named functions, such as
            `plimsoll.algorithm.policy_loss`; or of the package that has the named files.
        function: the name of the one function that each file of a package defines; None for a
            file of functions.
        arguments: how many arguments it is called with, by position.
        awaited: whether one's own function may be an `async def`.
        adapted: wraps one's own function, which may have another form, into a function of these
            arguments.

    Raises:
        ConfigError: a name, an option or an option's value cannot be used, or the function cannot
            be called with these arguments.
    """
    if ":" in choice.name:
        chosen = adapted(_own_function(choice.name, awaited))
    else:
        module, definition = _built_in(choice.name, package, function)
        chosen = vars(importlib.import_module(module))[definition.name]
    return bind_options(choice, chosen, package.rpartition(".")[2], arguments)


def bind_options(
    choice: Choice, function: Callable[..., Any], what: str, arguments: int = 1
) -> functools.partial[Any]:
    """Return the function with the choice's options bound.

    Args:
        choice: its name is for messages alone.
        function: the function that the choice names.
        what: what such functions are, for messages, such as `reward`.
        arguments: how many arguments it is called with, by position.

    Raises:
        ConfigError: as `resolve_choice`.
    """
    bound = functools.partial(function, **_checked_options(choice, _signature_of(function)))
    try:
        inspect.signature(bound).bind(*[None] * arguments)
    except TypeError as error:
        raise ConfigError(
            f"{choice.name!r} cannot be called as a function of {what}: "
            f"{error}. It must take {arguments} positional "
            f"{'argument' if arguments == 1 else 'arguments'}, and its options by keyword."
        ) from error
    return bound


def check_choice(choice: Choice, package: str) -> None:
    """Raise ConfigError, as `resolve_choice` does, for a name, an option or its value.

    A file of Plimsoll's is read, not imported: it may need torch, which the caller may lack. So the
    types of its options are those of config/base.py.
    """
    _checked_options(choice, _signature(choice, package))


def positional_parameters(choice: Choice, package: str) -> tuple[str, ...]:
    """Return the names of the positional parameters of the function that `choice` names.

    A file of Plimsoll's is read, not imported.

    Raises:
        ConfigError: the name cannot be used.
    """
    parameters, _ = _signature(choice, package)
    return tuple(name for name, p in parameters.items() if p.kind in _POSITIONAL)


_Signature = tuple[Mapping[str, inspect.Parameter], Mapping[str, Any]]
"""A function's parameters by name, and the namespace of their types."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _signature(choice: Choice, package: str) -> _Signature:
    if ":" in choice.name:
        return _signature_of(_own_function(choice.name))
    return _written_signature(choice.name, package)


def _signature_of(function: Callable[..., Any]) -> _Signature:
    return inspect.signature(function).parameters, inspect.unwrap(function).__globals__


@functools.cache  # a search for what fits checks the same names hundreds of times
def _written_signature(name: str, package: str) -> _Signature:
    written, empty = _built_in(name, package, None)[1].args, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for argument in (*written.posonlyargs, *written.args)
    ]
    parameters += [
        inspect.Parameter(
            option.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default is None else ast.unparse(default),
            annotation=empty if option.annotation is None else ast.unparse(option.annotation),
        )
        for option, default in zip(written.kwonlyargs, written.kw_defaults, strict=True)
    ]
    return {parameter.name: parameter for parameter in parameters}, vars(base)


def _built_in(name: str, package: str, function: str | None) -> tuple[str, ast.FunctionDef]:
    """Return the module of the function of Plimsoll's that a name chooses, and its syntax tree."""
    known = built_in_names(package, function)
    if name not in known:
        raise ConfigError(
            f"No {package.rpartition('.')[2]} is called {name!r}.{nearest(name, known)} Known: "
            f"{', '.join(known)}. A function of your own is chosen as my.module:my_function or "
            f"path/to/file.py:my_function."
        )
    module = package if function is None else f"{package}.{name}"
    return module, _functions_of(module)[function or name]


def built_in_names(package: str, function: str | None = None) -> list[str]:
    """Return the names, sorted, that choose a function of Plimsoll's; see `resolve_choice`."""
    if function is None:
        return sorted(name for name in _functions_of(package) if not name.startswith("_"))
    return [file for file in modules_in(package) if function in _functions_of(f"{package}.{file}")]


@functools.cache
def _functions_of(module: str) -> dict[str, ast.FunctionDef]:
    """Return the syntax trees of a module's functions by name; the module is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    nodes = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _own_function(name: str, awaited: bool = False) -> Callable[..., Any]:
    function = load_named(name)
    if inspect.iscoroutinefunction(function) and not awaited:
        raise ConfigError(
            f"{name!r} is an `async def`, and nothing would await what it gives. Name a plain "
            f"`def`, which may call it by asyncio.run."
        )
    if callable(function) and inspect.isfunction(inspect.unwrap(function)):
        return function
    raise ConfigError(
        f"{name!r} names a {type(function).__name__}, and a Python function is needed. "
        f"Name one that is defined with `def`."
    )


def _checked_options(choice: Choice, function: _Signature) -> dict[str, Any]:
    every, scope = function
    parameters = {n: p for n, p in every.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for name in choice.options:
        if name not in parameters:
            raise ConfigError(
                f"{choice.name!r} has no option {name!r}.{nearest(name, parameters)} "
                f"Its options: {', '.join(parameters) or 'none'} (the function's keyword-only "
                f"parameters)."
            )
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in choice.options:
            raise ConfigError(f"{choice.name!r} needs the option {name!r}: it has no default.")
    hints = _hints(choice.name, parameters, scope)
    return {
        name: _checked_value(choice.name, name, value, hints[name])
        for name, value in choice.options.items()
    }


def _hints(
    name: str, options: Mapping[str, inspect.Parameter], scope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the type of each option by name.

    Annotations of other parameters are not read: they may name what only a type checker imports.
    """
    annotations = {
        option: Any if p.annotation is inspect.Parameter.empty else p.annotation
        for option, p in options.items()
    }
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=annotations),
            globalns=dict(scope),
            include_extras=True,
        )
    except NameError as error:
        raise ConfigError(
            f"{name!r}: the type of an option cannot be read: {error}. Import it at the top of "
            f"the function's module, outside of `if TYPE_CHECKING`."
        ) from error


def _checked_value(choice: str, option: str, value: OptionValue, expected: Any) -> Any:
    try:
        return TypeAdapter[Any](expected).validate_python(value, strict=True)
    except ValidationError as error:
        reasons = " or ".join(dict.fromkeys(detail["msg"] for detail in error.errors()))
        raise ConfigError(
            f"The option {option!r} of {choice!r} is {value!r} ({type(value).__name__}). {reasons}."
        ) from error
