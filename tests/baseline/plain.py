"""Recorded texts, without what differs between two recordings of the same source: paths, times,
the machine's name, and which functions a traceback went through."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_CHANGING = [
    (r'(?m)^  File "ROOT/src[^\n]*\n(    [^\n]*\n)*', ""),
    (r"[\d.,]+ GB free\b", "# GB free"),
    (r"this machine has [\d.,]+ GB", "this machine has # GB"),
    (r"\bplimsoll \d+\.\d+[\w.]*", "plimsoll VERSION"),
    (r"events\.out\.tfevents\.[\w.-]+", "events.out.tfevents"),
    (r"\s*[\d,]+ tokens/s", " # tokens/s"),
    (r"\s*[\d.]+ s \([^)]*\)", " # s (#)"),
    (r"\| memory [^|\n]* of [^|\n]*?GB(?= \||\n|$)", "| memory #"),
    (r"calibrated \d{4}-[^\"]*", "calibrated #"),
    (r"Nearest the line: .*", "Nearest the line: #"),
    (r"left \d+:\d\d:\d\d", "left #"),
    (r"\bprocess \d+\b", "process #"),
    (r"\bpid[ =]\d+\b", "pid #"),
    (r"\.py:\d+\b|\.py\", line \d+", ".py:#"),
    (r"\b0x[0-9a-f]{6,}\b", "0x#"),
    (r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\]", "[TIME]"),
]
_NUMBER = re.compile(r"[+-]?\d[\d.,]*")


def normal(text: str, paths: Mapping[str, str], *, masked: bool = False) -> str:
    """paths: what to write instead of directories that are elsewhere next time. masked: without
    its numbers, which are the machine's, and without what they align."""
    known = {**paths, sys.prefix: "VENV", str(ROOT): "ROOT", str(Path.home()): "~"}
    for path in sorted(known, key=len, reverse=True):
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", known[path], text)
    for pattern, instead in _CHANGING:
        text = re.sub(pattern, instead, text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b:\d+", "HOST", text)
    return re.sub(r"[ \t]+", " ", _NUMBER.sub("#", text)) if masked else text


def pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for each innermost mapping and list, so that differences are short."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(one, dict | list) and one for one in inner):
        return json.dumps(value, ensure_ascii=False, default=_shown)
    more = indent + " "
    if isinstance(value, dict):
        lines = [f"{more}{json.dumps(key)}: {pretty(one, more)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(more + pretty(one, more) for one in value) + f"\n{indent}]"


def _shown(value: object) -> str:
    """Of what JSON has not, such as the bytes of a Parquet column."""
    return value.hex() if isinstance(value, bytes) else str(value)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
