"""A demo of all stages in minutes: make a task and a model, run SFT, PPO and GRPO, show results.

`plimsoll demo` makes the task and shows the results with the functions here; `cli/first.py` runs
the jobs in between, each as a command of its own.

All files are written below one directory, including the configs. So each stage can be repeated by
hand with `plimsoll sft`, `plimsoll ppo` and `plimsoll grpo`. There is also a config for
`plimsoll dpo`, which the demo does not run. The runs use the device that the installed vLLM is
built for.

The task is adding numbers digit by digit, with the carry written out. A problem is `47+85=`. A
worked answer adds the digits from the last to the first. Each addition includes the carry from the
addition before it. The answer ends with the sum:

`47+85= 7+5+0=12 4+8+1=13 #### 132`

In every problem the last digits carry. Most demonstrations are careless: they forget every carry
and get 122. A model that imitates all demonstrations is right less than half of the time. A reward
for the correct sum favours the careful answers. Every character is a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import pyarrow.parquet as parquet
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plimsoll.commands.planning import local_host_of, refuse_conflicts
from plimsoll.config.base import AUTO
from plimsoll.config.problems import refuse
from plimsoll.jobs import JOBS
from plimsoll.machine.versions import installed_version
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.page.answers import freeze_replies
from plimsoll.page.progress import seconds
from plimsoll.page.serve import RUNS, render_page
from plimsoll.page.watched import Watched, read_whole_run, watch_runs
from plimsoll.resolve.load import load_spec
from plimsoll.resolve.rules.machine import local_host_rules, missing_needs
from plimsoll.run.console import standard_terminal
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import remove_directory, write_whole
from plimsoll.run.json_lines import read_rows, write_rows

ALPHABET = "0123456789+=# "
END = "<end>"


@dataclass(frozen=True)
class SumProblem:
    """Two numbers with the same number of digits."""

    a: int
    b: int
    digits: int

    @property
    def prompt(self) -> str:
        """The problem, such as `47+85=`."""
        return f"{self.a:0{self.digits}d}+{self.b:0{self.digits}d}="

    @property
    def answer(self) -> str:
        """The correct sum."""
        return str(self.a + self.b)

    def worked_answer(self, careful: bool) -> str:
        """Return the additions and the sum as text; a careless answer forgets every carry."""
        steps, carry, total, answer = [], 0, 0, 0
        for place in range(self.digits):
            x, y = self.a // 10**place % 10, self.b // 10**place % 10
            total = x + y + carry
            steps.append(f"{x}+{y}+{carry}={total}")
            carry = total // 10 if careful else 0
            answer += total % 10 * 10**place
        answer += total // 10 * 10**self.digits
        return f" {' '.join(steps)} #### {answer}"


def problems(count: int, digits: int, seed: int) -> Iterator[SumProblem]:
    """Yield `count` different problems whose last digits carry; `seed` determines all of them."""
    assert count <= 10 ** (2 * digits) * 45 // 100
    rng = np.random.default_rng(seed)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        a, b = (int(x) for x in rng.integers(10**digits, size=2))
        if a % 10 + b % 10 > 9 and (a, b) not in seen:
            seen.add((a, b))
            yield SumProblem(a, b, digits)


def write_problems(path: Path, chosen: Sequence[SumProblem], careless: float, seed: int) -> None:
    """Write a JSON line per problem: prompt, demonstration (`response`) and correct answer.

    `careless` is the share of careless demonstrations, 0 to 1.
    """
    draws = np.random.default_rng(seed).random(len(chosen))
    rows = [
        {
            "prompt": p.prompt,
            "response": p.worked_answer(careful=draw >= careless),
            "answer": p.answer,
        }
        for p, draw in zip(chosen, draws, strict=True)
    ]
    write_rows(path, rows)


def write_pairs(path: Path, chosen: Sequence[SumProblem]) -> None:
    """Write a JSON line per problem: prompt, careful answer and careless answer."""
    rows = [
        {"prompt": p.prompt, "careful": p.worked_answer(True), "careless": p.worked_answer(False)}
        for p in chosen
    ]
    write_rows(path, rows)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character, and a token that ends a response.

    It is byte-level BPE without merges. Qwen2's tokenizers are byte-level BPE, so all programs that
    load the model read this tokenizer in the same way.
    """
    mapped = [token for token, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(ALPHABET)]
    characters = [*"".join(mapped), END]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


DIGITS = 2
TRAINING_PROBLEMS = 3500
HELD_OUT_PROBLEMS = 500
CARELESS = 0.6

_RUNS = ("sft", "ppo", "grpo")
"""The jobs that the demo runs."""
_REPORT = "report.txt"
"""The file that a finished demo has."""


def begin(home: Path, seed: int) -> None:
    """Prepare the demo in a directory, and refuse it if this machine cannot run its jobs.

    An interrupted demo is kept, and continues. A finished demo is removed and starts anew.
    """
    if (home / _REPORT).exists():
        standard_terminal().print(f"removing the last demo in {home}")
        remove_directory(home)
    prepare(home, seed)
    ppo = load_spec(JOBS["ppo"], str(home / "ppo.yaml"))
    refuse(missing_needs(ppo))
    refuse_conflicts(local_host_rules(ppo, local_host_of(ppo.cluster)))


def prepare(home: Path, seed: int) -> None:
    """Write the problems, the pairs, a randomly initialised model and the configs below `home`."""
    home.mkdir(parents=True, exist_ok=True)
    drawn = list(problems(TRAINING_PROBLEMS + HELD_OUT_PROBLEMS, DIGITS, seed))
    write_problems(home / "train.jsonl", drawn[:TRAINING_PROBLEMS], CARELESS, seed)
    write_problems(home / "test.jsonl", drawn[TRAINING_PROBLEMS:], CARELESS, seed + 1)
    write_pairs(home / "pairs.jsonl", drawn[:TRAINING_PROBLEMS])
    write_pairs(home / "test_pairs.jsonl", drawn[TRAINING_PROBLEMS:])
    tokenizer = make_tokenizer()
    config = tiny_config(
        "qwen2", True, vocab=32, hidden=128, layers=3, heads=4, kv_heads=2, feed_forward=384
    )
    config.eos_token_id = tokenizer.eos_token_id
    write_tiny_model(home / "model", config, seed, tokenizer)
    # vLLM's CPU build cannot use a GPU.
    device = "cpu" if installed_version("vllm") is None else AUTO
    for name in (*_RUNS, "dpo"):
        file = files("plimsoll.commands").joinpath("demo_configs", f"{name}.yaml")
        template = Template(file.read_text(encoding="utf-8"))
        text = template.substitute(directory=home, seed=seed, device=device)
        write_whole(home / f"{name}.yaml", text)


def tell(home: Path, console: Console, elapsed: float) -> tuple[float, float, float]:
    """Print results, some answers and the time by phase; write page and report.

    Return the shares of held-out problems with exactly correct answers after SFT, and after PPO and
    GRPO, which both start from the model after SFT. `elapsed` are the seconds of the demo.
    """
    runs = {name: RunDirectory(home / name) for name in _RUNS}
    ppo, grpo = (read_rows(runs[name].metrics_path) for name in ("ppo", "grpo"))
    first, by_ppo, by_grpo = (float(row["eval/correct"]) for row in (ppo[0], ppo[-1], grpo[-1]))
    console.print(
        f"exact match on {HELD_OUT_PROBLEMS} problems never trained on, answers sampled at "
        f"temperature 1:\n  after SFT   {first:6.1%}\n  and PPO     {by_ppo:6.1%}"
        f"\n  or GRPO     {by_grpo:6.1%}\n"
    )
    steps = [int(row["step"]) for row in ppo if row["step"] > 0]
    console.print(_answers(runs["ppo"], steps[0], "some answers of PPO's first step"))
    console.print(_answers(runs["ppo"], steps[-1], "and of its last"))
    watched = [read_whole_run(run) for run in watch_runs([run.path for run in runs.values()])]
    console.print(_times(watched))
    page_path = home / "curves.html"
    write_whole(page_path, render_page("PPO and GRPO", freeze_replies(watched[1:], ()), RUNS))
    directories = ", ".join(str(run.path) for run in runs.values())
    console.print(f"\n{elapsed:.0f} s in all. Curves: {page_path}. Run directories: {directories}")
    write_whole(
        home / _REPORT,
        f"exact match after SFT: {first:.4f}\nafter PPO: {by_ppo:.4f}\n"
        f"after GRPO: {by_grpo:.4f}\nseconds: {elapsed:.0f}\n",
    )
    return first, by_ppo, by_grpo


def _answers(run: RunDirectory, step: int, title: str) -> Table:
    table = _table(title, ("problem", "answer"), ("right is", "reward"))
    columns = ["prompt", "response", "reference", "reward"]
    for row in parquet.read_table(run.trajectories_path(step), columns=columns).to_pylist()[:4]:
        table.add_row(row["prompt"], row["response"], row["reference"], f"{row['reward']:g}")
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for name in (*left, *right):
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _times(runs: Sequence[Watched]) -> Table:
    table = _table("where the time went", ("job", "phase"), ("seconds",))
    for read in runs:
        phases = [item for part in seconds(read).values() for item in part.items()]
        for phase, total in sorted(phases, key=lambda item: -item[1]):
            table.add_row(read.name.upper(), phase, f"{total:.1f}")
    return table
