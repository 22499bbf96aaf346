"""`plimsoll from-openrlhf` as a user meets it: streams, files, exit codes, and a dry run of what it
writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.cli import main

SCRIPT = """\
MODEL=${1:-model}
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --pretrain $MODEL \\
   --dataset rows.jsonl --prompt_key q --chosen_key a --rejected_key b \\
   --max_len 32 --train_batch_size 2 --micro_train_batch_size 1 --bf16 --save_path out
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 1 --module $training_commands
fi
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a script, a model and rows."""
    monkeypatch.chdir(tmp_path)
    shape = {"model_type": "qwen2", "max_position_embeddings": 64}
    scorer = {**shape, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    for name, config in (("model", shape), ("scorer", scorer)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        save_file({"w": np.zeros((2, 3), dtype=np.float32)}, folder / "model.safetensors")
    row = {"q": "x", "a": "y", "b": "z", "input": "x", "out": "y", "label": True}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path


def test_the_config_goes_to_a_file_and_the_table_to_stderr(capsys: Captured) -> None:
    assert main(["from-openrlhf", "run.sh", "-o", "dpo.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        "--micro_train_batch_size 1 --max_len 32  ->  batch.micro_batch_tokens: 64" in printed.err
    )
    assert (
        "OpenRLHF's defaults that are other ones here\n  --seed 42  ->  run.seed: 42" in printed.err
    )
    text = Path("dpo.yaml").read_text()
    assert text.startswith("# dpo: from OpenRLHF 0.9.1, train_dpo\nrun:\n  directory: out")
    assert "  max_tokens: 32  # --max_len 32\n" in text
    assert "  seed: 42  # default: --seed 42\n" in text
    assert main(["dpo", "dpo.yaml", "--dry-run", "--cluster.device", "cpu"]) == 0


def test_without_a_file_the_config_is_printed(capsys: Captured) -> None:
    assert main(["from-openrlhf", "run.sh", "--version", "0.8.11"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# dpo: from OpenRLHF 0.8.11,") and out.endswith("\n")


@pytest.mark.parametrize(
    "command",
    [
        "train_sft --dataset rows.jsonl --output_key out --max_len 32 --micro_train_batch_size 1",
        "train_rm --dataset rows.jsonl --prompt_key q --chosen_key a --rejected_key b --max_len 32",
        "train_kto --dataset rows.jsonl --output_key out --max_len 32 --train_batch_size 2",
        "train_kd --dataset rows.jsonl --output_key out --max_len 32 --teacher_model model",
        "train_ppo --prompt_data rows.jsonl --prompt_max_len 16 --generate_max_len 16 "
        "--reward_pretrain scorer --train_batch_size 8 --rollout_batch_size 8",
        "train_ppo_ray --prompt_data rows.jsonl --prompt_max_len 16 --generate_max_len 16 "
        "--remote_rm_url reward.py --train_batch_size 8 --rollout_batch_size 8 "
        "--actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --label_key label",
    ],
)
def test_what_is_written_passes_a_dry_run_with_its_files(
    command: str, folder: Path, capsys: Captured
) -> None:
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels): return [0.0]\n")
    words = f"{command} --pretrain model --save_path out --bf16".split()
    launcher = ["deepspeed", "--num_gpus", "1", "--module"] if "ray" not in command else []
    words = [*launcher, f"openrlhf.cli.{words[0]}", *words[1:]]
    assert main(["from-openrlhf", "-o", "c.yaml", "--", *words]) == 0, capsys.readouterr().err
    job = Path("c.yaml").read_text().split(":")[0].removeprefix("# ")
    capsys.readouterr()
    code = main([job, "c.yaml", "--dry-run", "--cluster.device", "cpu"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Dry run: nothing was started." in printed.out


def test_plan_and_suggest_go_on_to_the_plan(capsys: Captured) -> None:
    words = ["openrlhf.cli.train_sft", "--pretrain", "Qwen/Qwen2.5-7B", "--dataset", "d"]
    words += ["--output_key", "o", "--zero_stage", "3", "--bf16"]
    options = ["--cluster", "8xA100-80GB", "--host-memory", "1TB", "-o", "sft.yaml"]
    assert main(["from-openrlhf", "--plan", *options, "--", *words]) == 3
    printed = capsys.readouterr()
    assert "verdict: does not fit" in printed.out  # micro-batches of 8, without checkpointing
    assert "sft.yaml does not fit" in printed.err
    assert main(["from-openrlhf", "--suggest", *options, "--", *words]) == 3
    assert "gradient_checkpointing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Neither a script nor a command is given"),
        (["gone.sh"], "gone.sh: there is no such script."),
        (["runn.sh"], "Did you mean run.sh?"),
        (["run.sh", "--", "x"], "A script and a command are given"),
        (["--", "python", "train.py"], "starts no program of OpenRLHF's"),
        (["--", "openrlhf.cli.train_stf"], "Did you mean train_sft?"),
        (["run.sh", "--version", "0.5"], "--version '0.5' is no release"),
        (["run.sh", "--version", "0.11.2"], "--pretrain: model"),
        (["run.sh", "--set", "MODEL"], "--set 'MODEL' is no NAME=VALUE"),
        (["run.sh", "--command", "2"], "--command 2: run.sh has 1 to 1"),
        (["run.sh", "--ouput", "x"], "unrecognized arguments: --ouput x"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: Captured) -> None:
    assert main(["from-openrlhf", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("error: ") and printed.out == ""


def test_a_script_with_several_commands_and_variables(folder: Path, capsys: Captured) -> None:
    sft = "python -m openrlhf.cli.train_sft --pretrain $MODEL --dataset $(ls d) --output_key o"
    (folder / "two.sh").write_text(f"{SCRIPT}\n{sft}\n")
    assert main(["from-openrlhf", "two.sh"]) == 2
    assert "  1 train_dpo (line 9)\n  2 train_sft (line 12)" in capsys.readouterr().err
    assert main(["from-openrlhf", "two.sh", "--command", "2", "--set", "MODEL=other"]) == 0
    printed = capsys.readouterr()
    assert "path: other  # --pretrain other" in printed.out
    assert "path: $(ls d)" in printed.out
    assert "the script: $(ls d): a command, which is not run" in printed.err


def test_what_cannot_work_together_ends_with_the_flags_that_say_it(capsys: Captured) -> None:
    words = ["openrlhf.cli.train_ppo_ray", "--pretrain", "m", "--prompt_data", "p"]
    words += ["--reward_pretrain", "r", "--use_kl_loss", "--kl_estimator", "k1"]
    assert main(["from-openrlhf", "-o", "c.yaml", "--", *words]) == 4
    err = capsys.readouterr().err
    assert "algorithm.kl.estimator: k1   (--kl_estimator k1)" in err
    assert not Path("c.yaml").exists()
