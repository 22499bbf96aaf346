"""Load Python files by path, and names of a module or a file; report wrong paths.

A name is `my.module:NAME` or `path/to/file.py:NAME`. A relative path is seen from the directory in
which the command was started; a run's processes work there too (cluster/ray_actors.py).
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from plimsoll.errors import ConfigError

_LOCK = Lock()
_ALLOWED: ContextVar[Collection[str] | None] = ContextVar("allowed", default=None)
"""The names and paths that may be loaded; None: all."""
_FILES: dict[Path, ModuleType] = {}
_AGAINST_A_PATH = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP}


@contextmanager
def loading_only(names: Collection[str]) -> Iterator[None]:
    """Inside the block, let `load_named` and `load_file` raise ConfigError for all other names."""
    token = _ALLOWED.set(names)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def _check_allowed(name: str) -> None:
    allowed = _ALLOWED.get()
    if allowed is not None and not any(name in (a, a.rpartition(":")[0]) for a in allowed):
        raise ConfigError(f"{name!r} is code that the config of an untrusted run names.")


@contextmanager
def usable_paths() -> Iterator[None]:
    """Turn errors of the system about a path inside the block into ConfigError.

    For example, a name may be too long, or a folder not accessible.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _AGAINST_A_PATH or error.filename is None:
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Give another path, or correct its rights."
        ) from error


def load_named(name: str) -> object:
    """Return the object that `my.module:NAME` or `path/to/file.py:NAME` names.

    Like a module, a file runs once in a process.

    Raises:
        ConfigError: the module or file cannot be loaded, or has nothing of this name; or
            `loading_only` forbids it.
    """
    _check_allowed(name)
    place, _, member = name.rpartition(":")
    module = _file(place) if place.endswith(".py") else _import(place, member, name)
    if member not in vars(module):
        known = [key for key, value in vars(module).items() if _is_own(value, module)]
        raise ConfigError(
            f"{name!r}: {place} has no {member!r}.{nearest(member, known)} It has: "
            f"{', '.join(sorted(known)) or 'no class and no function'}."
        )
    named: object = vars(module)[member]
    return named


def _file(path: str) -> ModuleType:
    whole = Path(path).resolve()
    if whole not in _FILES:
        _FILES[whole] = load_file(path)
    return _FILES[whole]


def _import(module: str, member: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module of one's own may do anything
        raise ConfigError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}. Write "
            f"my.module:{member}, and put the folder that holds the module on PYTHONPATH; or "
            f"path/to/file.py:{member}.{_where_it_is(module, member, error)}"
        ) from error


def _where_it_is(module: str, member: str, error: BaseException) -> str:
    """Return a hint at the file of a module that was not found; "" if it is not in this folder."""
    file = Path(module.replace(".", "/") + ".py")
    if not isinstance(error, ModuleNotFoundError) or not file.is_file():
        return ""
    return f" {file} is in this folder: {file}:{member} finds it."


def _is_own(value: object, module: ModuleType) -> bool:
    routine = inspect.isclass(value) or inspect.isfunction(value)
    return routine and getattr(value, "__module__", None) == module.__name__


def modules_in(package: str) -> list[str]:
    """Return the names of the modules of a package, sorted."""
    folders = importlib.import_module(package).__path__
    return [module.name for module in pkgutil.iter_modules(folders)]


def values_in(package: str, name: str) -> tuple[Any, ...]:
    """Return the value of this name from each module of a package."""
    return tuple(vars(importlib.import_module(f"{package}.{m}"))[name] for m in modules_in(package))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the name closest to a misspelt one; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def load_file(path: str, stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Run a Python file, anew at each call, and return it as a module.

    The module stays in `sys.modules` under a name of its own, which dataclasses and pickles need.

    Args:
        path: the path of the file.
        stand_ins: modules by name, which the file imports in place of installed ones.

    Raises:
        ConfigError: there is no such file, or it raises an error, or `loading_only` forbids it.
    """
    _check_allowed(path)
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"There is no file {path!r}{_others(file)}")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"plimsoll_file_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path!r} is no Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    with _replacing_modules(stand_ins or {}):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ConfigError(
                f"{path!r} cannot be loaded: {type(error).__name__}: {error}.{_missing(error)}"
            ) from error
    return module


@contextmanager
def _replacing_modules(stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Inside the block, let imports of these names give these modules; then restore the others."""
    with _LOCK:
        before = {name: sys.modules.get(name) for name in stand_ins}
        sys.modules.update(stand_ins)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module


def _others(file: Path) -> str:
    """Return the end of a message about a missing file: which files may have been meant."""
    if not file.parent.is_dir():
        return f": there is no folder {str(file.parent)!r}, as seen from {str(Path.cwd())!r}."
    names = sorted(sibling.name for sibling in file.parent.glob("*.py"))
    close = difflib.get_close_matches(file.name, names, n=1)
    if close:
        return f". Did you mean {str(file.with_name(close[0]))!r}?"
    return f": {str(file.parent.resolve())!r} has {', '.join(names[:20]) or 'no Python file'}."


def _missing(error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return (
        f" Install what brings {error.name!r}; if it is a file of your own, put its folder on "
        f"PYTHONPATH."
    )
