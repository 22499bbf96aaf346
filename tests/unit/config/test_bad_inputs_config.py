"""Values of a wrong kind at any key of a config: refused by key and line, or taken as they are."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from examples import percent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refused import refused_command
from safetensors.numpy import save_file

from plimsoll.cli import main
from plimsoll.config.keys import ANY, Key, keys_of
from plimsoll.jobs import JOBS

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
}
RUN = "run: {directory: out, steps: 3}\nactor: {model: {path: model}}\n"
CONFIGS = {
    "sft": f"{RUN}data: {{train: {{path: rows.jsonl, prompt: q, response: a}}}}\n",
    "dpo": f"{RUN}data: {{train: {{path: rows.jsonl, prompt: q, chosen: a, rejected: b}}}}\n",
    "ppo": f"{RUN}data: {{train: {{path: rows.jsonl, prompt: q, reference: a}}}}\n"
    "critic: {model: {path: model}}\nrewards: {r: {name: math_answer}}\n",
    "grpo": f"{RUN}data: {{train: {{path: rows.jsonl, prompt: q, reference: a}}}}\n"
    "rewards: {r: {name: math_answer}}\nbatch: {responses: 4}\n",
}
VALUES = (
    *("nan", "inf", "-.inf", "-1", "0", "1.5", "1e308", "99999999999999999", "true", "text"),
    *("''", "~", "[]", "{}", "[1, 2]", "[[[]]]", "{a: 1}", "[~]", "{~: ~}", "'%s'", "auto"),
    *("/dev/null", "/proc/self/mem", "'../../etc/passwd'", f"'{'x' * 300}'", "'{{ x.__class__ }}'"),
)
KEYS = [(job, key) for job in CONFIGS for key in keys_of(JOBS[job].config)]
Draw = tuple[tuple[str, Key], str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"q": "1+1", "a": "2", "b": "3"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("model/tokenizer.json").write_text("{}")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros(1, dtype=np.float32)}, "model/model.safetensors")


@settings(max_examples=percent(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=2))
def test_a_value_of_a_wrong_kind_ends_in_a_refusal(drawn: list[Draw]) -> None:
    job = drawn[0][0][0]
    Path("c.yaml").write_text(CONFIGS[job])
    flags: list[str] = []
    for (_, key), value in drawn:
        names = ("x" if part == ANY else part for part in key.path)
        flags += [f"--{'.'.join(names)}", value]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([job, "c.yaml", "--dry-run", *flags])
    assert code in (0, 2, 3, 4), said.getvalue()
    assert code == 0 or said.getvalue().startswith("error: ")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "run.directory"),
        ("5\n", "c.yaml"),
        ("- a\n", "c.yaml"),
        ("run: 5\n", "run"),
        ("run: {directory: out\n", "c.yaml:2"),
        ("run: {a: 1, a: 2}\n", "c.yaml:1"),
        ("a: &a [*a]\n", "c.yaml:1"),
        ("run: !!python/object/apply:os.system ['true']\n", "c.yaml:1"),
        ("run: !evil {}\n", "c.yaml:1"),
        ("run: {<<: {directory: out}}\n", "c.yaml"),
        ("\x00", "c.yaml"),
        ("\ufffe", "c.yaml"),
        ("[" * 5000, "c.yaml"),
        ("a: " + "{a: " * 2000, "c.yaml"),
        ("---\na: 1\n---\nb: 1\n", "c.yaml"),
        ("\tx: 1\n", "c.yaml:1"),
        ("run: {directory: '\\0'}\n", "data.train"),
        ("%YAML 9.9\n---\na: 1\n", "c.yaml"),
        ("? [a]\n: 1\n", "c.yaml"),
        ("run: *nothing\n", "c.yaml:1"),
    ],
)
def test_a_text_that_is_no_config(text: str, place: str) -> None:
    Path("c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    refused_command(["sft", "c.yaml", "--dry-run"], place)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x80", b"run: \xe9\n"])
def test_bytes_that_are_no_text(content: bytes) -> None:
    Path("c.yaml").write_bytes(content)
    refused_command(["sft", "c.yaml", "--dry-run"], "c.yaml")
