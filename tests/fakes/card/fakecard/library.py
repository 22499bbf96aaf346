"""Build the card's library from its source, and load it, which must come before torch."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fcntl import LOCK_EX, flock
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_CARD = Path(__file__).parents[1]
_SOURCES = _CARD / "cpp"
_BUILT = _CARD / "build"
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")

_library: ctypes.CDLL | None = None
_why_not = "this process has no card of host memory: only `make test-card` has it"


class NoCardError(Exception):
    """Says why a process cannot have the card."""


def library() -> ctypes.CDLL:
    """Return the card's library. Raises NoCardError if this process has none."""
    if _library is None:
        raise NoCardError(_why_not)
    return _library


def why_not() -> str:
    """Return why this process has no card; "" if it has one."""
    return "" if _library is not None else _why_not


def load_library() -> bool:
    """Build the library if it is missing, and load it; return whether this process has it now."""
    global _library, _why_not
    if _library is None:
        try:
            _library = _with_types(ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL))
        except NoCardError as error:
            _why_not = str(error)
    return _library is not None


def _built() -> Path:
    """Return the library for these sources and this torch, built if it is not there."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCardError("the card of host memory is built with g++, which is not installed")
    torch = _torch_folder()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise NoCardError(
            "the card of host memory needs the CPU build of torch, and this is CUDA's"
        )
    sources = sorted(_SOURCES.iterdir())
    parts = [torch / "version.py", *sources]
    key = hashlib.sha256(
        b"".join([*(part.read_bytes() for part in parts), repr(_OPTIONS).encode()])
    )
    built = _BUILT / f"fakecard-{key.hexdigest()[:16]}.so"
    _BUILT.mkdir(exist_ok=True)
    with (_BUILT / "lock").open("w") as lock:
        flock(lock, LOCK_EX)  # other processes wait for this one's build
        if not built.exists():
            _build(compiler, torch, sources, built)
    return built


def _build(compiler: str, torch: Path, sources: Sequence[Path], built: Path) -> None:
    include, partial = torch / "include", built.with_suffix(".partial")
    places = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{torch / 'lib'}"]
    linked = [f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    files = [str(source) for source in sources if source.suffix == ".cpp"]
    subprocess.run([compiler, *_OPTIONS, "-o", str(partial), *files, *places, *linked], check=True)
    partial.rename(built)


def _torch_folder() -> Path:
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "_C"):
        raise NoCardError("the card of host memory must be loaded before torch is imported")
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoCardError("the card of host memory needs torch")
    return Path(spec.origin).parent


def _with_types(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of functions whose arguments or results are no plain int."""
    number, text = ctypes.c_int64, ctypes.c_char_p
    results = {
        "fc_stat": number,
        "fc_get_stream": number,
        "fc_new_stream": number,
        "fc_races": text,
        "fc_segments": text,
    }
    arguments: dict[str, list[Any]] = {
        "fc_stat": [text],
        "fc_takes_scalars": [text],
        "fc_set_stream": [number],
        "fc_sync_stream": [number],
        "fc_wait_stream": [number, number],
        "fc_capacity": [number],
        "fc_limit": [number],
        "fc_fail_at": [number, number],
        "fc_pin": [ctypes.c_void_p, ctypes.c_size_t],
        "fc_unpin": [ctypes.c_void_p],
    }
    for name, kind in results.items():
        getattr(loaded, name).restype = kind
    for name, kinds in arguments.items():
        getattr(loaded, name).argtypes = kinds
    return loaded
