"""Command lines that are given to plimsoll, many of them in one process: `main` of plimsoll.cli is
all that is asked for. As a script it is that process, whose standard input lists the calls."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plain import normal, pretty, write

PINNED = {
    "COLUMNS": "100",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUTF8": "1",
    "NO_COLOR": "1",
}
_LEFT_OUT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
_PATIENCE = 3000


@dataclass(frozen=True)
class Call:
    """name: of the file with what it said. folder: where it runs. environment: what it has besides,
    for which it gets a process of its own. heavy: it imports torch. masked: its numbers are the
    machine's.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    heavy: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Said:
    """What a call printed, and the code it ended with."""

    code: int
    out: str
    err: str


def run_calls(calls: Sequence[Call], out: Path, paths: Mapping[str, str]) -> dict[str, Said]:
    """Make all the calls and write what each said to `out`; by name."""
    assert len({call.name for call in calls}) == len(calls), "two calls of one name"
    own = [call for call in calls if call.environment]
    shared = [call for call in calls if not call.environment]
    light, heavy = ([c for c in shared if c.heavy == kind] for kind in (False, True))
    batches = [heavy, light[::2], light[1::2], *([call] for call in own)]
    with ThreadPoolExecutor(2) as threads:
        said = [*threads.map(_batch, [batch for batch in batches if batch])]
    found = {name: one for batch in said for name, one in batch.items()}
    for call in calls:
        here = {**paths, str(call.folder): "HERE"}
        write(out / f"{call.name}.txt", _text(call, found[call.name], here))
    return found


def _text(call: Call, said: Said, paths: Mapping[str, str]) -> str:
    out = said.out
    if out.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            out = pretty(json.loads(out)) + "\n"
    out, err = (normal(part, paths, masked=call.masked) for part in (out, said.err))
    words = normal(" ".join(call.words), paths)
    return f"$ plimsoll {words}\n{out}--- exit code {said.code}\n{err}"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a process that runs plimsoll."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return {**kept, **PINNED, **more}


def _batch(calls: Sequence[Call]) -> dict[str, Said]:
    if calls[0].environment:
        return {call.name: alone(call) for call in calls}
    asked = [{"name": c.name, "words": c.words, "folder": str(c.folder)} for c in calls]
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment({}),
        timeout=_PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"the calls ended with {done.returncode}: {done.stderr[-3000:]}")
    return {name: Said(*said) for name, said in json.loads(done.stdout.splitlines()[-1]).items()}


def alone(call: Call, python: str = sys.executable) -> Said:
    """In a process of its own, as a user starts it."""
    done = subprocess.run(
        [python, "-m", "plimsoll", *call.words],
        cwd=call.folder,
        env=environment(call.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def _here(words: Sequence[str], folder: str) -> tuple[int, str, str]:
    from plimsoll.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except Exception:  # noqa: BLE001  what nobody foresaw is recorded too
            code = 1
            err.write(traceback.format_exc().splitlines()[-1])
    return code, out.getvalue(), err.getvalue()


def _main() -> None:
    asked: list[dict[str, Any]] = json.load(sys.stdin)
    print(json.dumps({one["name"]: _here(one["words"], one["folder"]) for one in asked}))


if __name__ == "__main__":
    _main()
