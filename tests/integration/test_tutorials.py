"""The tutorials' commands run in the order in which they are read, with two steps for each run.

All read and write below one directory, as a reader's do, so that what one page says of another's
run holds.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_here

PROJECT = Path(__file__).parents[2]
PAGES = [
    PROJECT / "docs" / "tutorials" / f"{name}.md"
    for name in ("sft", "dpo", "grpo", "agent", "will-it-fit")
]
SHORT = ("--run.steps", "2", "--actor.optimizer.warmup_steps", "0", "--cluster.threads", "1")
TRAINING = ("sft", "dpo", "grpo", "dr_grpo", "rloo")
ROWS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tutorials")
    shutil.copytree(PROJECT / "examples" / "calculator", home / "examples" / "calculator")
    return home


def files_of(page: str) -> dict[str, str]:
    """What the page shows of files: each begins with its name."""
    code = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.S)
    configs = re.findall(r"```yaml\n(# \w+: (\S+)\n.*?)```", page, re.S)
    return dict(code) | {name: body for body, name in configs}


def commands_of(page: str) -> list[list[str]]:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.S)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in lines if words and words[0] != "export"]


def is_open_ended(words: list[str]) -> bool:
    """What serves a page until it is ended."""
    return words[1] == "watch" or "--open" in words


def shorten(home: Path) -> None:
    """Leave a few held-out rows of each task, as two steps are not to wait for hundreds."""
    for path in home.glob("runs/*/test*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:ROWS]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(
    home: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(home)
    for name, body in files_of(page.read_text()).items():
        (home / name).write_text(body)
    for words in commands_of(page.read_text()):
        if words[0] != "plimsoll":
            program = [sys.executable, *words[1:]] if words[0] == "python" else words
            subprocess.run(program, cwd=home, check=True, stdout=subprocess.DEVNULL)
        elif is_open_ended(words):
            assert all((home / word).exists() for word in words[2:] if not word.startswith("--"))
        else:
            short = SHORT if words[1] in TRAINING and "--help" not in words else ()
            found = run_here(home, *words[1:], *short)
            unfit = words[1] == "plan" and "mine.yaml" in words and "--apply" not in words
            assert found.code in ((0, 3) if unfit else (0,)), (words, found.err)
        if "prepare.py" in words[1] or "--files-only" in words:
            shorten(home)


def test_every_tutorial_is_tried() -> None:
    assert sorted((PROJECT / "docs" / "tutorials").glob("*.md")) == sorted(PAGES)
