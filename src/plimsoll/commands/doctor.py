"""`plimsoll doctor`: is this machine fit for runs, and how is what is wrong mended?"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from plimsoll.commands.doctor_checks import judge
from plimsoll.commands.doctor_finding import Finding
from plimsoll.commands.doctor_machine import observe
from plimsoll.errors import PlimsollError

_WIDTH = 80
_COLOURS = {"ok": "32", "warn": "33", "wrong": "31"}


def examine(directory: str, address: str | None) -> list[Finding]:
    """Look at this machine; changes nothing.

    directory: where runs are to be written. address: a Ray cluster that should answer.
    """
    return judge(observe(directory, address))


def shown(findings: Sequence[Finding], as_json: bool) -> str:
    """The table, in colours on a terminal, or JSON."""
    if as_json:
        return json.dumps(report(findings), indent=2)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n".join(table(findings, colour=colour))


def refuse_wrong(findings: Sequence[Finding]) -> None:
    """Raise PlimsollError if anything is wrong."""
    wrong = [finding.name for finding in findings if finding.state == "wrong"]
    if wrong:
        raise PlimsollError(f"this machine is not fit for runs: {', '.join(wrong)}.")


def table(findings: Sequence[Finding], *, colour: bool = False) -> list[str]:
    """Lines of at most 80 columns (where no word is longer), the last with the counts."""
    names = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _lines(finding, names, colour)]
    count = Counter(finding.state for finding in findings)
    return [*lines, "", f"{count['wrong']} wrong, {count['warn']} to look at, {count['ok']} ok"]


def report(findings: Sequence[Finding]) -> dict[str, object]:
    """What --json prints."""
    count = Counter(finding.state for finding in findings)
    return {
        "wrong": count["wrong"],
        "warn": count["warn"],
        "ok": count["ok"],
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(finding: Finding, names: int, colour: bool) -> list[str]:
    indent = " " * (names + 8)
    first = f"{finding.state:<6}{finding.name:<{names}}  "
    lines = _wrap(finding.seen, first, indent)
    if colour:
        lines[0] = f"\033[{_COLOURS[finding.state]}m{lines[0][:6]}\033[0m{lines[0][6:]}"
    if finding.why:
        lines += _wrap(finding.why, indent, indent)
    if finding.fix:
        lines += _wrap(f"-> {finding.fix}", indent, f"{indent}   ")
    return lines


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
