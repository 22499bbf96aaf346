"""`plimsoll plan`, and the plan that every job makes before it starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.cli import main
from plimsoll.resolve.run_spec import RunSpec

HEAVY = ("torch", "ray", "deepspeed", "vllm", "transformers", "datasets", "numpy", "pyarrow")
SFT = """\
# sft: a model that few machines hold
run: {directory: out, steps: 3}
cluster: {where: local, device: cpu}
data: {train: {path: rows.jsonl, prompt: q, response: a}}
actor: {model: {path: model}}
"""
PLANNED = SFT.replace("path: model", "path: Qwen/Qwen2.5-0.5B").replace("rows.jsonl", "none.jsonl")
HUGE = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a job that no machine holds, and one without data and weights."""
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(SFT)
    Path("plan.yaml").write_text(PLANNED)
    Path("rows.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(HUGE))
    Path("model/tokenizer.json").write_text("{}")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros(1, dtype=np.float32)}, "model/model.safetensors")
    return tmp_path


def test_a_plan_needs_neither_data_nor_weights_nor_anything_heavy() -> None:
    script = (
        "import sys, plimsoll.cli as cli\n"
        "code = cli.main(['plan', 'plan.yaml', '--cluster', 'A100-80GB', '--json'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert json.loads(done.stdout)["verdict"] == "fits"
    assert not Path("out").exists()


def test_options_win_over_the_file(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster.device=cuda", "--cluster.where=ray", "--nodes", "2"]
    hardware = ["--cluster", "2xH100", "--host-memory", "900e9", "--cluster.address=head:6379"]
    assert main([*words, *hardware, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [host["capacity_bytes"] for host in values["hosts"]] == [900 * 10**9] * 2
    assert [device["device"] for device in values["devices"]] == ["node 0, card 0"]


def test_what_does_not_fit_ends_with_3_and_says_why(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster.device", "cuda", "--cluster", "4GB"]
    assert main(words) == 3
    said = capsys.readouterr()
    assert "error device-memory: 1 x 4GB" in said.out and "verdict: does not fit" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.err == "error: plan.yaml does not fit\n"


def test_suggestions_come_after_the_plan_and_are_taken_as_flags(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster", "8GB", "--host-memory", "64GB"]
    hardware = [*words, "--cluster.device=cuda"]
    assert main([*hardware, "--json"]) == 3
    unasked = json.loads(capsys.readouterr().out)
    assert unasked["suggestions"] == []
    assert main([*hardware, "--suggest"]) == 3
    assert "\n\nwhat fits  " in capsys.readouterr().out
    assert main([*hardware, "--suggest", "--all"]) == 3
    assert "\n\nwhat would fit" in capsys.readouterr().out
    assert main([*hardware, "--suggest", "--json"]) == 3
    asked = json.loads(capsys.readouterr().out)
    first = asked["suggestions"][0]
    assert first["number"] == 1
    assert main([*hardware, *first["flags"].split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == first["verdict"]


def test_all_items_are_shown_on_request(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster", "cpu", "--host-memory", "64GB"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert main([*words, "--all"]) == 0
    whole = capsys.readouterr().out
    assert "`plimsoll plan --all` shows every item" in short and "--all" not in whole
    totals = [line for line in short.splitlines() if line.startswith("  in all")]
    assert totals and all(line in whole.splitlines() for line in totals)
    assert "+ optimizer states" in whole and "+ optimizer states" not in short


def test_an_answer_is_printed_or_written_as_a_config(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster", "8GB", "--host-memory", "64GB", "--apply", "1"]
    words += ["--cluster.device=cuda"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith(PLANNED.splitlines()[0]) and "hardware: 8GB" in text
    assert main([*words, "-o", "new/one.yaml"]) == 0
    assert capsys.readouterr().out == "new/one.yaml: plan.yaml with answer 1\n"
    assert Path("new/one.yaml").read_text() == text
    assert main(["plan", "new/one.yaml"]) == 0
    assert "verdict: fits" in capsys.readouterr().out
    Path("new/one.yaml").write_text("mine")
    assert main([*words, "-o", "new/one.yaml"]) == 2
    assert "-o new/one.yaml is there already" in capsys.readouterr().err
    assert Path("new/one.yaml").read_text() == "mine"
    assert main([*words, "-o", "new/one.yaml", "--force"]) == 0
    assert Path("new/one.yaml").read_text() == text


def test_the_page_is_written_whole_with_the_plan_within(capsys: Captured) -> None:
    words = ["plan", "plan.yaml", "--cluster", "cpu", "--host-memory", "64GB", "--html", "a/p.html"]
    assert main(words) == 0
    text = Path("a/p.html").read_text()
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert embedded is not None
    shown = json.loads(embedded[1])["plan"]
    assert shown["plan"]["places"][0]["name"] == "host memory (node 0)"
    assert (shown["controls"], shown["refusal"]) == ([], None)
    assert "host memory (node 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["plan"], 2, "config"),
        (["plan", "none.yaml"], 2, "no such config file"),
        (["plan", "plan.yaml", "--cluster", "8xA1000"], 2, "A100-80GB"),
        (["plan", "plan.yaml", "--host-memory", "1 apple"], 2, "512GiB"),
        (["plan", "plan.yaml", "--nodes", "0"], 2, "cluster.nodes: 0"),
        (["plan", "plan.yaml", "--nodes", "-1"], 2, "cluster.nodes: -1"),
        (["plan", "plan.yaml", "--actor.model.path", "Qwen/Qwen9-1B"], 2, "Nearest: Qwen/Qwen"),
        (["plan", "plan.yaml", "--actor.zero.parameter_offload", "cpu"], 4, "stage"),
        (
            ["plan", "plan.yaml", "--cluster", "cpu", "--cluster.hardware=cpu"],
            2,
            "--cluster and --cluster.hardware",
        ),
        (
            ["plan", "plan.yaml", "--cluster.nodes", "2", "--nodes", "2"],
            2,
            "--nodes and --cluster.nodes",
        ),
        (["plan", "plan.yaml", "--jsn"], 2, "--jsn"),
        (["plan", "plan.yaml", "--apply", "one"], 2, "--apply"),
        (["plan", "plan.yaml", "--cluster", "cpu", "--apply", "99"], 2, "no such answer"),
        (["plan", "plan.yaml", "--apply", "1", "--json"], 2, "not allowed with"),
        (["plan", "plan.yaml", "--apply", "1", "--html", "x.html"], 2, "no plan"),
        (["plan", "plan.yaml", "-o", "new.yaml"], 2, "--apply N"),
        (["plan", "plan.yaml", "--force"], 2, "-o"),
        (["plan", "plan.yaml", "--apply", "1", "--force", "-o", "model"], 2, "is a directory"),
    ],
)
def test_wrong_usage_is_one_block(words: list[str], code: int, part: str, capsys: Captured) -> None:
    assert main(words) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and part in said and "Traceback" not in said


def test_a_job_that_does_not_fit_is_refused_before_it_starts(capsys: Captured) -> None:
    assert main(["sft", "sft.yaml"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: the run does not fit\n")
    assert "host-memory" in said and "--force" in said and "the actor's" in said
    assert not Path("out").exists()


def test_force_starts_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RunSpec[Any]] = []
    monkeypatch.setattr("plimsoll.jobs.sft_loop.run", lambda spec, planned: started.append(spec))
    assert main(["sft", "sft.yaml", "--force"]) == 0
    assert len(started) == 1


def test_a_dry_run_shows_the_plan(capsys: Captured) -> None:
    assert main(["sft", "sft.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "actor moments" in said and "verdict: does not fit" in said
    assert said.rstrip().endswith("Dry run: nothing was started.")


def test_a_machine_with_less_than_planned_is_a_problem(capsys: Captured) -> None:
    words = ["sft", "sft.yaml", "--cluster.device=auto", "--cluster.hardware=64xB200"]
    assert main([*words, "--cluster.host_memory=900TB"]) == 3
    said = capsys.readouterr().err
    assert said.count("less-than-planned") == 2 and "64 GPUs" in said and "900,000 GB" in said


def test_a_model_of_unknown_family_is_guessed_and_the_run_starts(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunSpec[Any]] = []
    monkeypatch.setattr("plimsoll.jobs.sft_loop.run", lambda spec, planned: started.append(spec))
    Path("model/config.json").write_text(json.dumps(HUGE | {"model_type": "mamba9"}))
    assert main(["sft", "sft.yaml"]) == 0
    assert "model-family" in capsys.readouterr().err
    assert len(started) == 1
    assert main(["plan", "sft.yaml"]) == 3  # it would not fit
    assert "coarse" in " ".join(capsys.readouterr().out.split())
    bare = {"model_type": "mamba9", "hidden_size": 64}
    Path("model/config.json").write_text(json.dumps(bare))
    assert main(["sft", "sft.yaml"]) == 0
    assert "no plan of memory" in capsys.readouterr().err
    assert len(started) == 2


def test_a_model_of_unknown_name_has_no_plan_and_one_line_says_why(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    hub.has = {"nobody/knows"}
    monkeypatch.setattr("plimsoll.jobs.sft_loop.run", lambda spec, planned: None)
    words = ["--actor.model.path", "nobody/knows", "--data.chat_template", "none"]
    assert main(["sft", "sft.yaml", *words]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("no plan of memory: ") and "'nobody/knows'" in line
    assert main(["plan", "sft.yaml", *words]) == 2
    assert "meta-llama/Llama-2-7b-hf" in capsys.readouterr().err


def test_a_cluster_elsewhere_is_not_taken_for_this_machine(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunSpec[Any]] = []
    monkeypatch.setattr("plimsoll.jobs.sft_loop.run", lambda spec, planned: started.append(spec))
    words = ["sft", "sft.yaml", "--cluster.where=ray", "--cluster.address=head:6379"]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "no plan of memory: " in told and "head:6379" in told and "cluster.hardware" in told
    assert main([*words, "--cluster.hardware=cpu", "--cluster.host_memory=64GB"]) == 3
    assert len(started) == 1
