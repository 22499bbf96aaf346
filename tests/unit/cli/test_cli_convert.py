"""`plimsoll from-openrlhf`, `from-trl` and `from-verl` as a user meets them: streams, files,
exit codes, and a dry run of what they write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from told_problems import read_problems

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
    rows = dict(line.strip().split("  ->  ") for line in printed.err.splitlines() if "  ->" in line)
    budget = rows["--micro_train_batch_size 1 --max_len 32"]
    assert budget.startswith("batch.micro_batch_tokens: 64 ")
    assert rows["--seed 42"] == "run.seed: 42"
    text = Path("dpo.yaml").read_text()
    title, *_ = text.splitlines()
    assert title == "# dpo: from OpenRLHF 0.9.1, train_dpo"
    assert yaml.safe_load(text)["run"]["directory"] == "out"
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
        "train_ppo_ray --prompt_data rows.jsonl --prompt_max_len 16 --generate_max_len 16 "
        "--reward_pretrain scorer --train_batch_size 8 --rollout_batch_size 8 "
        "--actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1",
        "train_ppo_ray --prompt_data rows.jsonl --prompt_max_len 16 --generate_max_len 16 "
        "--remote_rm_url reward.py --train_batch_size 8 --rollout_batch_size 8 "
        "--actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --label_key label",
    ],
)
def test_configs_from_openrlhf_pass_a_dry_run(command: str, folder: Path, capsys: Captured) -> None:
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
        ([], "plimsoll from-openrlhf"),
        (["gone.sh"], "gone.sh: "),
        (["runn.sh"], "run.sh?"),
        (["run.sh", "--", "x"], "one of them"),
        (["--", "python", "train.py"], "no program of OpenRLHF's"),
        (["--", "openrlhf.cli.train_stf"], "train_sft?"),
        (["run.sh", "--version", "0.5"], "--version '0.5'"),
        (["run.sh", "--version", "0.11.2"], "--pretrain: model"),
        (["run.sh", "--set", "MODEL"], "--set 'MODEL'"),
        (["run.sh", "--command", "2"], "--command 2: run.sh has 1 to 1"),
        (["run.sh", "--ouput", "x"], "arguments: --ouput x"),
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
    listed = capsys.readouterr().err.splitlines()
    assert "  1 train_dpo (line 9)" in listed and "  2 train_sft (line 12)" in listed
    assert main(["from-openrlhf", "two.sh", "--command", "2", "--set", "MODEL=other"]) == 0
    printed = capsys.readouterr()
    assert "path: other  # --pretrain other" in printed.out
    assert "path: $(ls...)" in printed.out
    assert "the script: $(ls...): " in printed.err


def test_a_conflict_names_the_foreign_flags(capsys: Captured) -> None:
    words = ["openrlhf.cli.train_ppo_ray", "--pretrain", "m", "--prompt_data", "p"]
    words += ["--reward_pretrain", "r", "--use_kl_loss", "--kl_estimator", "k1"]
    assert main(["from-openrlhf", "-o", "c.yaml", "--", *words]) == 4
    [problem] = read_problems(capsys.readouterr().err)
    assert (problem.key, problem.what) == ("algorithm.kl.estimator", "k1")
    assert problem.where == "--kl_estimator k1"
    assert not Path("c.yaml").exists()


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
OTHERS = [TURNS[0], {"role": "assistant", "content": "z"}]
TRL = "--model_name_or_path model --dataset_name turns.jsonl --max_length 32 --output_dir out"
RL = "--model_name_or_path model --dataset_name turns.jsonl --output_dir out --max_prompt_length 32"
VERL = (
    "actor_rollout_ref.model.path=model data.train_files=turns.jsonl data.train_batch_size=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.name=hf "
    "data.max_prompt_length=32 data.max_response_length=16 trainer.n_gpus_per_node=1 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.total_training_steps=2 "
    "trainer.logger=console trainer.default_local_dir=out "
    "custom_reward_function.path=reward.py"
)


@pytest.fixture
def turns(folder: Path) -> None:
    """Rows as TRL's and verl's data hold them, and a reward function of verl's."""
    row = {
        "messages": TURNS,
        "chosen": TURNS,
        "rejected": OTHERS,
        "prompt": TURNS[:1],
        "solution": "y",
        "reward_model": {"style": "rule", "ground_truth": "y"},
        "data_source": "openai/gsm8k",
    }
    (folder / "turns.jsonl").write_text(json.dumps(row) + "\n")
    text = {"prompt": "x", "completion": "y", "label": True}
    (folder / "text.jsonl").write_text(json.dumps(text) + "\n")
    score = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    (folder / "reward.py").write_text(score)
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("trl", f"trl sft {TRL}"),
        ("trl", f"trl dpo {TRL} --beta 0.2"),
        ("trl", f"trl reward {TRL}"),
        ("trl", f"trl kto {TRL} --dataset_name text.jsonl --per_device_train_batch_size 2"),
        ("trl", f"trl grpo {RL} --reward_funcs accuracy_reward --max_completion_length 16"),
        ("trl", f"trl rloo {RL} --reward_funcs accuracy_reward --max_completion_length 16"),
        ("verl", f"python3 -m verl.trainer.main_ppo {VERL} critic.model.path=model"),
        (
            "verl",
            f"python3 -m verl.trainer.main_ppo {VERL} algorithm.adv_estimator=grpo "
            "actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.use_kl_loss=True",
        ),
        (
            "verl",
            "torchrun --nproc_per_node=1 -m verl.trainer.sft_trainer data.max_length=32 "
            "model.path=model data.train_files=turns.jsonl trainer.default_local_dir=out "
            "trainer.logger=console",
        ),
    ],
)
@pytest.mark.usefixtures("turns")
def test_configs_from_trl_and_verl_pass_a_dry_run(
    trainer: str, words: str, capsys: Captured
) -> None:
    assert main([f"from-{trainer}", "-o", "c.yaml", "--", *words.split()]) == 0
    job = Path("c.yaml").read_text().split(":")[0].removeprefix("# ")
    capsys.readouterr()
    code = main([job, "c.yaml", "--dry-run", "--cluster.device", "cpu"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Dry run: nothing was started." in printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from-trl"], "`plimsoll from-trl -- trl sft --config sft.yaml`"),
        (["from-trl", "sft.yaml"], "sft.yaml is no script"),
        (["from-trl", "--", "accelerate", "launch", "mine.py"], "a script of your own"),
        (["from-verl", "--", "python", "x.py"], "no program of verl's"),
        (["from-verl", "--version", "0.9", "x.sh"], "arguments: --version"),
    ],
)
def test_wrong_usage_of_from_trl_and_from_verl(
    words: list[str], message: str, capsys: Captured
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_commands_of_trl_and_verl_are_planned(capsys: Captured) -> None:
    options = ["--plan", "--cluster", "8xA100-80GB", "--host-memory", "1TB"]
    words = "trl sft --model_name_or_path Qwen/Qwen2.5-7B --dataset_name d --num_processes 8"
    assert main(["from-trl", *options, "--", *words.split(), "--accelerate_config", "zero3"]) == 0
    assert "verdict: fits" in capsys.readouterr().out
    words = "verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
    words += "data.train_files=d.parquet algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
    assert main(["from-verl", *options, "--", *words.split()]) in (0, 3)
    assert "verdict: " in capsys.readouterr().out


QWEN = "Qwen/Qwen2.5-0.5B"
OF_VERL = f"verl.trainer.main_ppo actor_rollout_ref.model.path={QWEN} critic.model.path={QWEN} "
OF_VERL += "data.train_files=d.parquet trainer.nnodes=2"
OF_OPENRLHF = f"openrlhf.cli.train_ppo_ray --pretrain {QWEN} --prompt_data d --remote_rm_url f.py "
OF_OPENRLHF += "--actor_num_gpus_per_node 32 --critic_num_gpus_per_node 16 --vllm_num_engines 16"
OF_TRL = f"trl sft --model_name_or_path {QWEN} --dataset_name d"


@pytest.mark.parametrize(
    ("trainer", "words", "cards"),
    [
        ("verl", f"{OF_VERL} trainer.n_gpus_per_node=64", 64),
        # 32 of the actor's, 16 of the critic's, 16 of the engines', on 2 machines of 32
        ("openrlhf", OF_OPENRLHF, 32),
        ("trl", f"{OF_TRL} --num_processes 128 --num_machines 2", 64),
    ],
)
@pytest.mark.parametrize("option", ["--plan", "--suggest"])
def test_a_plan_is_refused_for_a_machine_with_fewer_cards_than_the_command(
    option: str, trainer: str, words: str, cards: int, capsys: Captured
) -> None:
    assert main([f"from-{trainer}", option, "-o", "c.yaml", "--", *words.split()]) == 2
    printed = capsys.readouterr()
    assert f"takes {cards} cards of each machine" in printed.err
    assert f"such as --cluster {cards}xA100-80GB." in printed.err
    assert printed.out == "" and not Path("c.yaml").exists()
    hardware = ["--cluster", f"{cards}xA100-80GB"]
    assert main([f"from-{trainer}", "--plan", *hardware, "--", *words.split()]) in (0, 3)
    assert "verdict: " in capsys.readouterr().out


def test_a_command_for_cpus_is_planned_for_this_machine(capsys: Captured) -> None:
    assert main(["from-trl", "--plan", "--", *OF_TRL.split(), "--use_cpu"]) in (0, 3, 4)
    assert "verdict: " in capsys.readouterr().out


@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_the_help_has_an_example(trainer: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([f"from-{trainer}", "--help"])
    assert f"plimsoll from-{trainer} [options] -- " in capsys.readouterr().out
