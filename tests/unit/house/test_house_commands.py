"""Every command and every config that the documents show is one that Plimsoll takes.

A job's command is read with the config that it names, of the same page or of another. Of other
commands each option is one that their help knows. What the tutorials show is run by a test of its
own, and so are the commands of docs/extend.md.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.commands.demo import prepare
from plimsoll.config.flags import split_flags
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.resolve.load import load_spec

PROJECT = Path(__file__).parents[3]
PAGES = [
    PROJECT / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
    *sorted((PROJECT / "notes").glob("*.md")),
    *sorted((PROJECT / "examples").glob("*/README.md")),
]
RUN_BY_ANOTHER_TEST = {"extend.md"}
CONFIG = re.compile(r"```yaml\n(# (\w+)(?:: (\S+\.yaml))?.*?)```", re.DOTALL)
EVERY_JOB = {"--dry-run", "--force", "--debug", "--replay", "--help"}


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" -- ")[0], comments=True)
            in_a_loop = "$" in line
            if words[:1] == ["plimsoll"] and not in_a_loop and page.name not in RUN_BY_ANOTHER_TEST:
                yield page.name, words[1:]


def configs() -> list[tuple[str, str, str, str]]:
    """Each config that a page shows whole: the page, its text, the job, and its file or nothing."""
    return [
        (page.name, text, job, file)
        for page in PAGES
        for text, job, file in CONFIG.findall(page.read_text())
        if job in JOBS
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are named: a page's own configs below its name, and those of the demo."""
    home = tmp_path_factory.mktemp("shown")
    for page, text, _, file in configs():
        if file:
            for folder in (home / page, home):
                folder.mkdir(exist_ok=True)
                (folder / file).write_text(text)
    with contextlib.chdir(home):
        prepare(Path("runs/demo"), seed=0)
    (home / "examples").symlink_to(PROJECT / "examples")
    return home


SHOWN = [pytest.param(*found, id=" ".join(found[1])) for found in commands()]


@pytest.mark.parametrize("page, words", SHOWN)
def test_a_command_is_one_that_plimsoll_takes(home: Path, page: str, words: list[str]) -> None:
    command, *rest = words
    rest, flags = split_flags(rest)
    with contextlib.chdir(home):
        if command in JOBS and "--help" not in rest:
            own = Path(page, rest[0])
            load_spec(JOBS[command], str(own if own.exists() else rest[0]), flags)
        known = EVERY_JOB if command in JOBS else options_of(command)
    assert {word for word in rest if word.startswith("--") and len(word) > 2} <= known


def options_of(command: str) -> set[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    return {"--help", *re.findall(r"--[a-z][\w-]*", printed.getvalue())}


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=f"{page}-{job}") for page, text, job, _ in configs()]
)
def test_a_config_is_one_that_plimsoll_takes(tmp_path: Path, text: str) -> None:
    (tmp_path / "shown.yaml").write_text(text)
    load_any(str(tmp_path / "shown.yaml"), ())
