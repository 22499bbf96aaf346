"""The tutorials' commands run in the order in which they are read, with two steps for each run.

All read and write below one directory, as a reader's do, so that what one page says of another's
run holds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_here

from plimsoll.run.json_lines import read_rows

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
    """Return what the page shows of files: each begins with its name."""
    code = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.S)
    configs = re.findall(r"```yaml\n(# \w+: (\S+)\n.*?)```", page, re.S)
    return dict(code) | {name: body for body, name in configs}


def commands_of(page: str) -> list[list[str]]:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.S)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in lines if words and words[0] != "export"]


def is_open_ended(words: list[str]) -> bool:
    """Return whether a command serves a page until it is ended."""
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


RANGE = re.compile(r"between (\d+) and (\d+) %|less than (\d+) %", re.IGNORECASE)
OF_THE_DATA = ["60 % of the teachers", "40 % are right"]
SFT, DPO, MARGIN = (f"runs/demo/{name}-sums" for name in ("sft", "dpo", "margin"))
AGENT = "runs/calculator/grpo"
FIGURES = {
    "sft": [(SFT, -1)],
    "dpo": [(SFT, -1), (DPO, -1), (MARGIN, -1)],
    "grpo": [(SFT, -1), ("runs/demo/grpo", -1)],
    "agent": [(AGENT, 0), (AGENT, -1)],
}
"""What each range of a page is of, in their order: a directory, and which of its evaluations."""
MEASURING = """
python examples/calculator/prepare.py --out runs/calculator
plimsoll demo --files-only
plimsoll sft runs/demo/sft.yaml
plimsoll grpo runs/demo/grpo.yaml
plimsoll dpo runs/demo/dpo.yaml
plimsoll dpo runs/demo/dpo.yaml --run.directory runs/demo/margin-only --algorithm.nll_weight 0
plimsoll eval runs/demo/grpo.yaml --model runs/demo/sft/model --out runs/demo/sft-sums
plimsoll eval runs/demo/grpo.yaml --model runs/demo/dpo/model --out runs/demo/dpo-sums
plimsoll eval runs/demo/grpo.yaml --model runs/demo/margin-only/model --out runs/demo/margin-sums
plimsoll sft examples/calculator/sft.yaml
plimsoll grpo examples/calculator/grpo.yaml
"""


def text_of(name: str) -> str:
    """Return what a page says, on one line, without its code."""
    page = (PROJECT / "docs" / "tutorials" / f"{name}.md").read_text()
    return " ".join(re.sub(r"```.*?```", "", page, flags=re.S).split())


def ranges_of(name: str) -> list[tuple[float, float]]:
    found = RANGE.findall(text_of(name))
    return [(0, float(most)) if most else (float(low), float(high)) for low, high, most in found]


def percent_of(directory: Path, which: int) -> float:
    """Return the percentage of right answers."""
    evaluation = directory / "eval.json"
    if evaluation.exists():
        return 100 * float(json.loads(evaluation.read_text())["correct"])
    rows = read_rows(directory / "metrics.jsonl")
    return 100 * float([row["eval/reward"] for row in rows if "eval/reward" in row][which])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_of_a_tutorial_is_a_range_that_is_measured(page: Path) -> None:
    assert len(ranges_of(page.stem)) == len(FIGURES.get(page.stem, ()))
    rest = RANGE.sub("", text_of(page.stem))
    for fact in OF_THE_DATA:
        rest = rest.replace(fact, "")
    assert "%" not in rest


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instructions", ["ALL", "AVX2"])
def test_figures_of_tutorials_are_in_their_ranges(instructions: str, tmp_path: Path) -> None:
    """The tutorials run with and without the CPU's instructions for bfloat16."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    shutil.copytree(PROJECT / "examples" / "calculator", tmp_path / "examples" / "calculator")

    for line in MEASURING.strip().splitlines():
        program, *words = shlex.split(line)
        module = ("-m", "plimsoll") if program == "plimsoll" else ()
        command = [sys.executable, *module, *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for name, measured in FIGURES.items():
        for (low, high), (directory, which) in zip(ranges_of(name), measured, strict=True):
            found = percent_of(tmp_path / directory, which)
            assert low <= found <= high, (name, directory, found)


def test_every_tutorial_is_tried() -> None:
    assert sorted((PROJECT / "docs" / "tutorials").glob("*.md")) == sorted(PAGES)
