"""Parts of a reward that contradict themselves are refused, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec

TEXT = """\
run: {directory: out, steps: 3}
cluster: {where: local}
data: {train: {path: rows.jsonl, prompt: p}, max_tokens: 100}
actor: {model: {path: m}}
critic: {model: {path: m}}
rollout: {transformers: {}}
rewards: {part: %s}
"""
JUDGE = "url: https://h/v1, model: m"


def load(tmp_path: Path, part: str) -> None:
    (tmp_path / "job.yaml").write_text(TEXT % part)
    load_spec(JOBS["ppo" if "ppo" in JOBS else "rl"], str(tmp_path / "job.yaml"), [])


@pytest.mark.parametrize(
    ("part", "key", "why"),
    [
        ("{weight: 1.0}", "part.name", "one source, and none is given"),
        ("{name: length, http: {urls: [http://h/s]}}", "part.name", "name and http is given"),
        ("{http: {urls: []}}", "part.http.urls", "no server to ask"),
        ("{http: {urls: [host:8000]}}", "part.http.urls", "no address of a server"),
        ("{http: {urls: [http://h/s], tokenizer: m}}", "part.http.tokenizer", "Plimsoll's format"),
        (
            "{http: {urls: [http://h/s], format: vllm, chat_template: none}}",
            "part.http.chat_template",
            "of the tokenizer of",
        ),
        ("{http: {urls: [http://h/s]}, process: true}", "part.process", "It is for functions"),
        ("{name: length, memory_gib: 1}", "part.memory_gib", "process: true"),
        ("{name: reasoning_gym}", "part.process", "evaluate a response as Python"),
        ("{name: length, clip: [1.0, 0.0]}", "part.clip", "first is not below the second"),
        (f"{{judge: {{{JUDGE}, prompt: Is it good}}}}", "part.judge.prompt", "not show the resp"),
        (f"{{judge: {{{JUDGE}, prompt: '{{response'}}}}", "part.judge.prompt", "no template"),
        (f"{{judge: {{{JUDGE}, prompt: '{{response}}', low: 10.0}}}}", "part.judge.low", "below"),
        (
            f"{{judge: {{{JUDGE}, prompt: '{{response}}', pattern: a}}}}",
            "part.judge.pattern",
            "no group",
        ),
        ("{judge: {url: h, model: m, prompt: '{response}'}}", "part.judge.url", "no address"),
        (
            "{judge: {url: 'https://us:Xy7@h/v1', model: m, prompt: '{response}'}}",
            "part.judge.url: https://***@h/v1 ",
            "A password in a URL",
        ),
        ("{http: {urls: ['http://Xy7@h/s']}}", "part.http.urls: http://***@h/s ", "api_key: the e"),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, part: str, key: str, why: str) -> None:
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        load(tmp_path, part)
    report = str(caught.value)
    assert report.startswith(f"1 problem in the settings\n  rewards.{key}"), report
    assert why in report and "[reward-settings]" in report and "Xy7" not in report


@pytest.mark.parametrize(
    "part",
    [
        "{name: length, clip: [-1, 0], normalize: true, truncated_factor: 0.5}",
        "{name: length, process: true, memory_gib: 1, time_limit: 3, at_once: 2, batch: false}",
        "{http: {urls: ['http://a:1/s', 'http://b:2/s'], format: openrlhf, tokenizer: m}}",
        f"{{judge: {{{JUDGE}, prompt: '{{prompt}} {{response}} {{level}}', api_key: KEY}}}}",
    ],
)
def test_what_agrees_is_taken(tmp_path: Path, part: str) -> None:
    load(tmp_path, part)
