"""Python files by their path, as modules."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType

from plimsoll.errors import ConfigError

_LOCK = Lock()


def load_file(path: str, stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """The module that a file makes; each call runs it anew. stand_ins: modules that it finds by
    their names while it runs, whatever is installed.

    It stays in `sys.modules` under a name of its own, which dataclasses and pickles need. Raises
    ConfigError where there is no file, and with what the file raises.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"There is no file {path!r}{_others(file)}")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"plimsoll_file_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path!r} is no Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    with _found_as(stand_ins or {}):
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
def _found_as(stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within: imports of these names give these modules."""
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
    """What may have been meant."""
    if not file.parent.is_dir():
        return f": there is no folder {str(file.parent)!r}, as seen from {str(Path.cwd())!r}."
    names = sorted(one.name for one in file.parent.glob("*.py"))
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
