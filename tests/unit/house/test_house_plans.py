"""The plans that the documents show are those that `plimsoll plan` prints.

A block begins with the command, whose config is named by its first line in the same document, and
shows some rows of the plan. To write them anew: `python tests/unit/house/test_house_plans.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from plimsoll.cli import main

DOCUMENTS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"(?<=```\n)plimsoll plan .*?(?=```)", re.DOTALL)
ROW = re.compile(r"  (\S+(?: \S+)*?)(?: {2,}.*| [\d.,]+ GB in .*)$")


def pages() -> list[Path]:
    found = sorted(DOCUMENTS.glob("*.md"))
    return [page for page in found if BLOCK.search(page.read_text())]


def renewed(text: str) -> str:
    """A document with the same rows of the same plans, as they are now."""
    return BLOCK.sub(lambda block: "\n".join(_section(text, s) for s in _sections(block[0])), text)


def _sections(block: str) -> list[str]:
    return [section.strip("\n") for section in block.split("\n\n")]


def _section(document: str, section: str) -> str:
    """A command, and of each place that it names the rows that are shown."""
    command, *shown = section.splitlines()
    places = _places(_printed(document, command))
    lines, place = [command], ""
    for line in shown:
        row = ROW.match(line)
        place = place if row else line
        lines.append(places[place][row[1]] if row else place)
    return "\n".join(lines) + "\n"


def _printed(document: str, command: str) -> str:
    """Return what the command prints, with the config of this name in the document."""
    name, *flags = shlex.split(command)[2:]
    config = re.search(rf"```yaml\n(# \w+: {re.escape(name)}\n.*?)```", document, re.DOTALL)
    assert config, f"no config begins with `# JOB: {name}`"
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        file = Path(folder) / name
        file.write_text(config[1])
        assert main(["plan", str(file), *flags]) == 0
    return printed.getvalue()


def _places(printed: str) -> dict[str, dict[str, str]]:
    """The rows of a plan's tables, by the table's title and the row's name."""
    tables = [table.splitlines() for table in printed.split("\n\n") if "  GB, " in table]
    return {
        title: {row[1]: line for line in rows if (row := ROW.match(line))}
        for title, *rows in tables
    }


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_plans_in_a_document_are_those_of_today(page: Path) -> None:
    assert renewed(page.read_text()).splitlines() == page.read_text().splitlines()


if __name__ == "__main__":
    for path in pages():
        path.write_text(renewed(path.read_text()))
