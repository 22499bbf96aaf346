"""For all tests: what one leaves in the process, or on the machine, is not to change another."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Other work may share the cores, so hypothesis measures no time. Each run draws the same examples,
# so a failure is about the change; `make test-all` draws others, and more.
settings.register_profile("plimsoll", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("plimsoll")


def pytest_collection_finish() -> None:
    """Have the garbage collector leave out the modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line each why tests were left out, and what changes it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} left out: {reason}")


@pytest.fixture(autouse=True, scope="module")
def _torchs_own_linear() -> Iterator[None]:
    """A ZeRO-3 engine leaves a linear of DeepSpeed's in torch, which saves other tensors."""
    yield
    if torch := sys.modules.get("torch"):
        torch.nn.functional.linear = torch._C._nn.linear


@pytest.fixture(autouse=True, scope="module")
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote is not what another test's import of that name finds."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(written):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows of tests are not those that this machine keeps, here or in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


_FAKES = Path(__file__).parent / "fakes"
_FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.reserved", "memory.used", "compute_cap",
    "driver_version", "mig.mode.current",
)  # fmt: skip


@pytest.fixture
def tell_cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have NVML tell of made-up cards, in this process and in those that it starts.

    Takes a line for each card, as nvidia-smi writes its fields, with what else there is of it as
    (line, {"processes": ..., "parts": ...}); or why the driver fails.
    """
    spec = spec_from_file_location("pynvml", _FAKES / "pynvml.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def tell(*cards: str | tuple[str, dict[str, Any]], trouble: str | None = None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        path = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(_FAKES), path))))
        monkeypatch.setenv("SAID_CARDS", json.dumps(trouble or [*map(_card, cards)]))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return tell


def _card(told: str | tuple[str, dict[str, Any]]) -> dict[str, Any]:
    line, more = (told, {}) if isinstance(told, str) else told
    return dict(zip(_FIELDS, line.split(", "), strict=True)) | more
