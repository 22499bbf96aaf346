"""One source or several: both forms load, flags reach into both, and errors name the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.config.data import SourceConfig, WeightedSource
from plimsoll.config.keys import describe_keys, dump_config
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import job_of
from plimsoll.resolve.load import load_spec

SFT = """\
run: {directory: out, steps: 3}
actor: {model: {path: m}}
data:
  train:
"""
ONE = SFT + "    path: rows.jsonl\n    messages: turns\n"
SEVERAL = (
    SFT
    + """\
    math: {path: math.jsonl, prompt: question, response: answer, weight: 3}
    books:
      path: books
      text: body
"""
)


def load(folder: Path, text: str, flags: str = "") -> SftConfig:
    (folder / "run.yaml").write_text(text)
    config: SftConfig = load_spec(JOBS["sft"], str(folder / "run.yaml"), flags.split()).config
    return config


def report(folder: Path, text: str, flags: str = "") -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, text, flags)
    return str(refused.value)


def test_one_source_stays_as_simple_as_it_was(tmp_path: Path) -> None:
    data = load(tmp_path, ONE, "--data.train.limit 5").data
    assert data.train == SourceConfig(path="rows.jsonl", messages="turns", limit=5)
    assert data.train_sources() == {"data.train": data.train}


def test_several_sources_have_names_weights_and_flags(tmp_path: Path) -> None:
    data = load(tmp_path, SEVERAL, "--data.train.books.weight=0.5 --data.train.math.limit 7").data
    math = WeightedSource(
        path="math.jsonl", prompt="question", response="answer", weight=3.0, limit=7
    )
    books = WeightedSource(path="books", text="body", weight=0.5)
    assert data.train == {"math": math, "books": books}
    assert data.train_sources() == {"data.train.math": math, "data.train.books": books}
    added = load(tmp_path, SEVERAL, "--data.train.chat.path=c --data.train.chat.messages=m").data
    assert list(added.train_sources()) == ["data.train.math", "data.train.books", "data.train.chat"]
    assert added.train_sources()["data.train.chat"] == WeightedSource(path="c", messages="m")


@pytest.mark.parametrize("text", [ONE, SEVERAL])
def test_a_dump_loads_to_the_same(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "flags", "key", "instead"),
    [
        (ONE, "--data.train.pth=x", "data.train.pth: x", "did you mean data.train.path?"),
        (ONE, "--data.train.weight=2", "data.train.weight: 2", "valid keys here: path, name"),
        (ONE, "--data.train.extra.path=x", "data.train.extra: {path: x}", "below names, as"),
        (ONE, "--data.train=rows.jsonl", "data.train: rows.jsonl", "data.train.path: rows.jsonl"),
        (ONE, "--actor.model=m", "actor.model: m", "such as actor.model.path: m"),
        (SEVERAL, "--data.train.math.weight=0", "data.train.math.weight: 0", "write such a value"),
        (SEVERAL, "--data.train.math.weight=-1", "data.train.math.weight: -1", "such a value"),
        (SEVERAL, "--data.train.math.weight=.nan", "data.train.math.weight: .nan", "such a value"),
        (SEVERAL, "--data.train.math.weight=yes", "data.train.math.weight: 'yes'", "such a value"),
        (SEVERAL, "--data.train.math.wieght=2", "data.train.math.wieght: 2", "train.math.weight?"),
        (SEVERAL, "--data.train.books=null", "data.train.books: null", "keys with values below it"),
        (SEVERAL, "--data.train.chat.messages=m", "data.train.chat.path", "-> write text"),
        (SEVERAL, "--data.train.maths.weight=2", "data.train.maths.path", "mean data.train.math?"),
        (SEVERAL, "--data.train.math.response=null", "data.train.math.response", "train.math.text"),
        (SEVERAL, "--data.train.books.messages=m", "data.train.books.messages", "books.text alone"),
        (SEVERAL, "--data.train.books.tools=t", "data.train.books.tools", "books.text alone"),
        (ONE, "--data.train.text=t", "data.train.messages: turns", "data.train.text alone"),
        (SFT.replace("train:", "train: {}"), "", "data.train.path", "write text"),
        (ONE, "--algorithm.neftune_alpha=0", "algorithm.neftune_alpha: 0", "such a value"),
        (ONE, "--algorithm.learned_tokens=asistant", "algorithm.learned_tokens", "mean assistant?"),
    ],
)
def test_a_problem_is_named_by_its_key(
    tmp_path: Path, text: str, flags: str, key: str, instead: str
) -> None:
    found = report(tmp_path, text, flags)
    assert found.startswith(f"1 problem in the settings\n  {key}"), found
    assert instead in found and "<source>" not in found and "<mixture>" not in found


def test_a_weight_that_is_no_number_says_what_it_must_be(tmp_path: Path) -> None:
    found = report(tmp_path, SEVERAL, "--data.train.math.weight=0")
    assert "It must be: number > 0." in found and "(flag --data.train.math.weight)" in found
    assert "(default 1.0)" in found


@pytest.mark.parametrize(
    ("job", "text", "columns"),
    [
        (DpoConfig, "", "--data.train.chosen=c --data.train.rejected=r"),
        (
            RlConfig,
            "critic: {model: {path: m}}\nrewards: {a: {name: exact_match}}\n",
            "--data.train.prompt=p",
        ),
    ],
)
def test_plain_text_is_for_sft(
    tmp_path: Path, job: type[JobConfig], text: str, columns: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SFT + "    path: rows.jsonl\n" + text)
    load_spec(job_of(job), str(path), columns.split())
    with pytest.raises(ConfigError, match=r"data\.train\.text: body.*\n +\[data-columns\]"):
        load_spec(job_of(job), str(path), [*columns.split(), "--data.train.text=body"])


def test_help_shows_both_forms() -> None:
    text = describe_keys(SftConfig, "data.train")
    assert "--data.train.path  [text; required]" in text
    assert re.search(r"--data\.train\.<name>\.weight .*> 0; default 1\.0\]", text)
    assert "--data.train.weight" not in text
