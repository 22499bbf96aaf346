"""`plimsoll doctor`: report whether this machine can run jobs, and how to correct its faults."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.text import Text

from plimsoll.commands.doctor.machine import Machine, observe
from plimsoll.commands.doctor.rules import MACHINE_RULES
from plimsoll.config.problems import Problem, Severity, find
from plimsoll.errors import PlimsollError
from plimsoll.run.console import Terminal

_WIDTH = 80
_STATES: Mapping[Severity, str] = {"ok": "ok", "warning": "warn", "error": "wrong"}
_COLOURS: Mapping[Severity, str] = {"ok": "green", "warning": "yellow", "error": "red"}


def examine(directory: str, address: str | None) -> list[Problem]:
    """Return the findings about this machine.

    `directory` is where runs would be written. `address` is a Ray cluster's, or None.
    """
    return diagnose(observe(directory, address))


def diagnose(machine: Machine) -> list[Problem]:
    """Return the findings of all rules about a machine, good and bad ones."""
    return list(find(MACHINE_RULES, machine))


def render_findings(findings: Sequence[Problem], terminal: Terminal | None) -> str:
    """Return the findings as a table, which is coloured if there is a terminal."""
    text = Text("\n".join(table(findings)))
    if terminal is None:
        return text.plain
    for severity, state in _STATES.items():
        text.highlight_regex(rf"(?m)^{state}\b", _COLOURS[severity])
    return terminal.draw(text, soft_wrap=True)


def findings_json(findings: Sequence[Problem]) -> str:
    """Return the findings as the JSON text that --json prints."""
    return json.dumps(report(findings), indent=2)


def refuse_wrong(findings: Sequence[Problem]) -> None:
    """Raise PlimsollError if any finding is an error."""
    wrong = [finding.key for finding in findings if finding.severity == "error"]
    if wrong:
        raise PlimsollError(f"this machine is not fit for runs: {', '.join(wrong)}.")


def table(findings: Sequence[Problem]) -> list[str]:
    """Return the lines of a table of findings, the last with their counts.

    Lines have at most 80 columns, unless a word is longer.
    """
    names = max(len(finding.key) for finding in findings)
    lines = [line for finding in findings for line in _lines(finding, names)]
    count = _counts(findings)
    return [*lines, "", f"{count['wrong']} wrong, {count['warn']} to look at, {count['ok']} ok"]


def report(findings: Sequence[Problem]) -> dict[str, object]:
    """Return the JSON values that --json prints: counts, and all findings."""
    rows = [
        {"name": finding.key, "state": _STATES[finding.severity], "seen": finding.what}
        | {"why": finding.why, "fix": finding.fix}
        for finding in findings
    ]
    return {**_counts(findings), "findings": rows}


def _counts(findings: Sequence[Problem]) -> dict[str, int]:
    by_severity = Counter(finding.severity for finding in findings)
    return {_STATES[severity]: by_severity[severity] for severity in ("error", "warning", "ok")}


def _lines(finding: Problem, names: int) -> list[str]:
    indent = " " * (names + 8)
    first = f"{_STATES[finding.severity]:<6}{finding.key:<{names}}  "
    lines = _wrap(finding.what, first, indent)
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
