"""Contradictions between keys: each is refused, with its key, why, and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.errors import ConfigError, PlimsollError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import job_of
from plimsoll.resolve.load import load_spec
from plimsoll.sampler.vllm.config import vllm_of

PPO = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, prompt: question}}
actor: {model: {path: m}}
critic: {model: {path: m}}
rewards: {answer: {name: math_answer}}
"""
SFT = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl}}
actor: {model: {path: m}}
"""
LOCAL = "--cluster.where=local --rollout.transformers={}"
THREE = "--cluster.nodes=3"
OWN_NODES = "--cluster.own_nodes.engines=1 --cluster.own_nodes.actor=1"
JUDGE = "--reward_model.role.model.path=judge"
WSD = "--actor.optimizer.schedule"
EVAL = "--data.eval.path=x --data.eval.prompt=q"
EVERY = f"--run.eval_every=1 {EVAL}"
BEST = "--run.best.metric=eval/reward"

# (flags that contradict, the key in the refusal, exit code, flags that mend it)
PPO_CASES = [
    ("--data.train.response=a", "data.train.response", 2, None),
    ("--cluster.where=local", "rollout.vllm", 4, "--rollout.transformers={}"),
    (f"{LOCAL} --cluster.ranks=2", "cluster.ranks", 4, None),
    (f"{LOCAL} --cluster.address=auto", "cluster.address", 4, None),
    (f"{LOCAL} --cluster.nodes=2", "cluster.nodes", 4, None),
    (
        "--actor.zero.optimizer_offload=cpu --actor.optimizer.kind=adamw_8bit",
        "actor.zero.optimizer_offload",
        4,
        None,
    ),
    (f"{LOCAL} --cluster.critic_ranks=2", "cluster.critic_ranks", 4, None),
    (f"{LOCAL} {JUDGE} --cluster.reward_ranks=2", "cluster.reward_ranks", 4, None),
    ("--cluster.reward_ranks=2", "cluster.reward_ranks", 4, JUDGE),
    (f"{LOCAL} --cluster.own_nodes.actor=1", "cluster.own_nodes", 4, None),
    ("--cluster.own_nodes.actor=1", "cluster.own_nodes.engines", 4, None),
    (f"{OWN_NODES} {THREE} --cluster.own_nodes.critic=1", "cluster.own_nodes.critic", 4, None),
    (
        f"{THREE} --cluster.own_nodes.engines=1 --cluster.own_nodes.actor=2",
        "cluster.own_nodes.actor",
        4,
        "--cluster.ranks=2",
    ),
    (f"{OWN_NODES} {THREE} --cluster.own_nodes.reward=1", "cluster.own_nodes.reward", 4, None),
    (
        f"{OWN_NODES} {THREE} {JUDGE} --cluster.reward_ranks=2",
        "cluster.own_nodes.reward",
        4,
        "--cluster.own_nodes.reward=1",
    ),
    (OWN_NODES, "cluster.nodes", 4, "--cluster.nodes=2"),
    ("--cluster.ranks=100000000", "cluster.ranks", 2, None),
    ("--cluster.nodes=100000000", "cluster.nodes", 2, None),
    ("--cluster.critic_ranks=100001", "cluster.critic_ranks", 2, None),
    (f"{JUDGE} --cluster.reward_ranks=100001", "cluster.reward_ranks", 2, None),
    ("--rollout.engines=50000 --rollout.vllm.pipeline_parallel=3", "rollout.engines", 2, None),
    ("--rollout.vllm.pipeline_parallel=1000000", "rollout.vllm.pipeline_parallel", 2, None),
    (
        f"{BEST} {EVERY} --run.best.goal=highest --run.keep_checkpoints=0",
        "run.best",
        4,
        None,
    ),
    ("--rollout.vllm.sleep_level=1", "rollout.vllm.sleep_level", 4, "--rollout.placement=shared"),
    ("--cluster.rank_sleep=states", "cluster.rank_sleep", 4, "--rollout.placement=shared"),
    (
        "--rewards.reward_model.name=length --reward_model.role.model.path=r",
        "rewards.reward_model",
        2,
        None,
    ),
    (
        "--rewards.answer.weight=0",
        "rewards",
        2,
        "--reward_model.role.model.path=r",
    ),
    (f"{LOCAL} --rollout.engines=2", "rollout.engines", 4, None),
    (
        "--rollout.transformers={} --rollout.vllm.tensor_parallel=2",
        "rollout.transformers",
        4,
        None,
    ),
    (
        "--rollout.transformers.max_sequences=4 --batch.responses=8",
        "rollout.transformers.max_sequences",
        4,
        None,
    ),
    (
        "--actor.zero.parameter_offload=cpu",
        "actor.zero.parameter_offload",
        4,
        "--actor.zero.stage=3",
    ),
    (
        "--actor.model.checkpoint_every=2",
        "actor.model.checkpoint_every",
        4,
        "--actor.model.gradient_checkpointing=selective",
    ),
    (
        "--critic.model.activation_offload=cpu",
        "critic.model.activation_offload",
        4,
        "--critic.model.gradient_checkpointing=true",
    ),
    (
        "--actor.zero.state_dtype=bfloat16 --actor.zero.stage=1",
        "actor.zero.state_dtype",
        4,
        "--actor.zero.gradient_dtype=bfloat16",
    ),
    (
        "--actor.zero.state_dtype=bfloat16 --actor.zero.stage=0",
        "actor.zero.state_dtype",
        4,
        None,
    ),
    (
        "--actor.zero.state_dtype=bfloat16 --actor.model.dtype=float32",
        "actor.zero.state_dtype",
        4,
        None,
    ),
    ("--actor.zero.quantized_weights=true", "actor.zero.quantized_weights", 4, None),
    (
        "--actor.zero.quantized_gradients=true",
        "actor.zero.quantized_gradients",
        4,
        "--actor.zero.stage=3",
    ),
    (
        "--actor.zero.hpz_partition_size=3 --actor.zero.stage=3 --cluster.ranks=4",
        "actor.zero.hpz_partition_size",
        4,
        None,
    ),
    (
        "--actor.zero.hpz_partition_size=2 --actor.zero.stage=3 --cluster.ranks=4 "
        "--actor.zero.parameter_offload=cpu",
        "actor.zero.hpz_partition_size",
        4,
        None,
    ),
    (
        "--actor.zero.hpz_partition_size=2 --actor.zero.stage=3 --cluster.ranks=4 "
        "--critic.zero.stage=3",
        "actor.zero.hpz_partition_size",
        4,
        "--cluster.critic_ranks=4",
    ),
    (
        "--critic.zero.optimizer_offload=cpu --critic.zero.stage=0",
        "critic.zero.optimizer_offload",
        4,
        None,
    ),
    (
        "--actor.zero.gradient_dtype=float32 --actor.zero.stage=0",
        "actor.zero.gradient_dtype",
        4,
        None,
    ),
    (
        "--actor.zero.gradient_dtype=bfloat16 --actor.model.dtype=float32",
        "actor.zero.gradient_dtype",
        4,
        None,
    ),
    ("--actor.optimizer.final_ratio=1.5", "actor.optimizer.final_ratio", 2, None),
    ("--actor.optimizer.warmup_steps=4", "actor.optimizer.warmup_steps", 2, "--run.steps=4"),
    (
        "--critic.optimizer.warmup_steps=7 --algorithm.epochs=2",
        "critic.optimizer.warmup_steps",
        2,
        "--algorithm.mini_batches=2",
    ),
    (
        "--actor.optimizer.warmup_ratio=0.1 --actor.optimizer.warmup_steps=1",
        "actor.optimizer.warmup_ratio",
        2,
        None,
    ),
    ("--actor.optimizer.beta1=1.0", "actor.optimizer.beta1", 2, None),
    ("--actor.ema.decay=1", "actor.ema.decay", 2, None),
    ("--critic.ema.decay=0.9", "critic.ema", 4, None),
    ("--actor.ema.decay=0.9 --actor.zero.state_dtype=bfloat16", "actor.ema", 4, None),
    ("--actor.optimizer.decay_steps=1", "actor.optimizer.decay_steps", 4, f"{WSD}=wsd"),
    (f"{WSD}=wsd --actor.optimizer.decay_steps=4", "actor.optimizer.decay_steps", 2, None),
    (f"{BEST} --run.best.goal=highest", "run.best", 4, f"--run.eval_every=1 {EVAL}"),
    (f"{EVERY} {BEST}", "run.best.goal", 4, "--run.best.goal=highest"),
    (f"{EVERY} --run.best.patience=2", "run.best.metric", 2, "--run.best.metric=eval/answer"),
    ("--critic.optimizer.beta2=2", "critic.optimizer.beta2", 2, None),
    ("--algorithm.mini_batches=5", "algorithm.mini_batches", 2, "--batch.prompts=5"),
    ("--algorithm.critic_warmup_steps=3", "algorithm.critic_warmup_steps", 2, "--run.steps=4"),
    (
        "--algorithm.critic_warmup_steps=2 --actor.optimizer.warmup_steps=2",
        "actor.optimizer.warmup_steps",
        2,
        "--run.steps=4",
    ),
    ("--rollout.sampling.temperature=0", "rollout.sampling.temperature", 2, None),
    ("--rollout.sampling.top_p=0.9", "rollout.sampling.top_p", 2, None),
    ("--rollout.sampling.top_k=20", "rollout.sampling.top_k", 2, None),
    ("--rollout.sampling.min_p=0.1", "rollout.sampling.min_p", 2, None),
    (
        "--rollout.sampling.min_new_tokens=513",
        "rollout.sampling.min_new_tokens",
        4,
        "--rollout.sampling.max_new_tokens=513",
    ),
    (
        f"{EVAL} --eval_sampling.temperature=0 --eval_sampling.top_k=5",
        "eval_sampling.top_k",
        4,
        None,
    ),
    (
        f"{EVAL} --eval_sampling.temperature=0 --eval_sampling.min_p=0.5",
        "eval_sampling.min_p",
        4,
        None,
    ),
    (
        "--algorithm.kl=none --reference.model.path=r",
        "reference",
        4,
        None,
    ),
    (
        "--rollout.vllm.arguments.enforce_eagre=true",
        "rollout.vllm.arguments.enforce_eagre",
        2,
        None,
    ),
    ("--rollout.vllm.arguments.max_num_seqs=8", "rollout.vllm.arguments.max_num_seqs", 2, None),
    (
        "--rollout.vllm.arguments.logprobs_mode=raw_logits",
        "rollout.vllm.arguments.logprobs_mode",
        2,
        None,
    ),
    ("--algorithm.kl.place=loss", "algorithm.kl.estimator", 4, None),
    (
        "--algorithm.kl.coefficient=0 --algorithm.kl.adaptive.target=6",
        "algorithm.kl.adaptive",
        4,
        None,
    ),
    ("--algorithm.kl.ratio_corrected=true", "algorithm.kl.ratio_corrected", 4, None),
    ('--rollout.sampling.stop=["x",""]', "rollout.sampling.stop", 2, None),
    (f'{EVAL} --eval_sampling.stop=[""]', "eval_sampling.stop", 2, None),
    ("--rewards.reward.name=length", "rewards.reward", 2, None),
    ("--rewards.finished.name=length", "rewards.finished", 2, None),
    ("--rewards.reward_low.name=length", "rewards.reward_low", 2, None),
    ("--rewards.a.name=length --rewards.a_high.name=length", "rewards.a_high", 2, None),
    ("--run.eval_every=2", "run.eval_every", 4, EVAL),
    ("--eval_sampling.temperature=0", "eval_sampling", 4, EVAL),
    ("--data.train.prompt=null", "data.train.prompt", 2, "--data.train.messages=m"),
    ("--data.train.messages=m", "data.train.messages", 2, None),
    ("--data.eval.path=x", "data.eval.prompt", 2, "--data.eval.messages=m"),
    ("--rewards.answer.weight=0", "rewards", 2, "--rewards.form.name=pattern"),
    (
        "--batch.micro_batch_tokens=2559",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=2047",
    ),
]
SFT_CASES = [
    ("", "data.train.prompt", 2, "--data.train.messages=m"),
    ("--data.train.prompt=q", "data.train.response", 2, "--data.train.response=a"),
    ("--data.train.response=a", "data.train.prompt", 2, "--data.train.prompt=q"),
    ("--data.train.messages=m --data.train.response=a", "data.train.messages", 2, None),
    ("--data.train.messages=m --data.train.chosen=c", "data.train.chosen", 2, None),
    ("--data.train.messages=m --data.train.reference=r", "data.train.reference", 2, None),
    ("--data.train.text=t --data.train.margin=x", "data.train.margin", 2, None),
    ("--data.train.messages=m --data.step_separator=,", "data.step_separator", 2, None),
    ("--data.train.messages=m --cluster.critic_ranks=1", "cluster.critic_ranks", 4, None),
    ("--data.train.messages=m --cluster.reward_ranks=1", "cluster.reward_ranks", 4, None),
    ("--data.train.messages=m --cluster.rank_sleep=all", "cluster.rank_sleep", 4, None),
    (
        "--data.train.messages=m --data.eval.path=x",
        "data.eval.prompt",
        2,
        "--data.eval.messages=m",
    ),
    ("--data.train.messages=m --cluster.where=local --cluster.ranks=2", "cluster.ranks", 4, None),
    (
        "--data.train.messages=m --batch.micro_batch_tokens=2047",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=2047",
    ),
    (
        "--data.train.messages=m --actor.optimizer.warmup_steps=4",
        "actor.optimizer.warmup_steps",
        2,
        "--run.steps=4",
    ),
]


def load(job: type[RlConfig] | type[SftConfig], path: Path, flags: str) -> JobConfig:
    config: JobConfig = load_spec(job_of(job), str(path), flags.split()).config
    return config


def refusal(job: type[RlConfig] | type[SftConfig], path: Path, flags: str) -> PlimsollError:
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        load(job, path, flags)
    return caught.value


@pytest.mark.parametrize(
    ("job", "flags", "key", "code", "mend"),
    [(RlConfig, *case) for case in PPO_CASES] + [(SftConfig, *case) for case in SFT_CASES],
)
def test_a_contradiction_is_refused_and_can_be_mended(
    tmp_path: Path,
    job: type[RlConfig] | type[SftConfig],
    flags: str,
    key: str,
    code: int,
    mend: str | None,
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO if job is RlConfig else SFT)
    error = refusal(job, path, flags)
    report = str(error)
    assert report.startswith(f"1 problem in the settings\n  {key}"), report
    assert error.exit_code == code
    known = tuple(keys_of(job))
    assert re.search(rf"   \(.*({re.escape(str(path))}:\d|flag --).*\)$", report.splitlines()[1])
    for named in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", report.replace(str(path), "")):
        assert find_key(known, tuple(named.split("."))), named
    if mend is not None:
        load(job, path, f"{flags} {mend}")


def test_rewards_may_be_left_out_beside_a_reward_model(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO.replace("rewards: {answer: {name: math_answer}}\n", ""))
    config = load(RlConfig, path, "--reward_model.role.model.path=r")
    assert isinstance(config, RlConfig) and config.rewards == {}
    report = str(refusal(RlConfig, path, ""))
    assert re.search(r"^  rewards: \{\}\n +\[no-reward\]", report, re.MULTILINE)
    assert re.search(r"-> .*`answer: \{name: math_answer\}`.*reward_model", report)


def test_reward_models_that_have_all_ranks_need_no_ranks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    sampled = re.sub(r"(?m)^critic: .*\n", "", PPO)
    path.write_text(sampled)
    flags = f"{JUDGE} --cluster.reward_ranks=4".split()
    with pytest.raises(SettingsConflict, match=r"\[reward-ranks\]") as caught:
        load_spec(JOBS["sample"], str(path), flags)
    assert "-> cluster.ranks: 4" in str(caught.value)
    load_spec(JOBS["sample"], str(path), [JUDGE, "--cluster.ranks=4"])


def test_settings_without_a_contradiction_load(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO)
    for flags in (
        LOCAL,
        EVAL + " --eval_sampling.temperature=0 --eval_sampling.top_p=0.5",
        "--algorithm.kl=none",
        '--rollout.vllm.arguments.speculative_config={"method":"ngram"} '
        "--rollout.vllm.arguments.enforce_eager=true",
    ):
        load_spec(JOBS["ppo"], str(path), flags.split())


def test_lists_reach_vllm_as_lists(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO)
    sizes = "--rollout.vllm.arguments.cudagraph_capture_sizes=[1, 2]"
    nested = '--rollout.vllm.arguments.compilation_config={"splitting_ops": ["a"]}'
    spec = load_spec(JOBS["ppo"], str(path), [sizes, nested])
    assert spec.engines is not None and vllm_of(spec.engines).arguments == {
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"splitting_ops": ["a"]},
    }


def test_the_nearest_argument_of_vllms_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO)
    report = str(refusal(RlConfig, path, "--rollout.vllm.arguments.enforce_eagre=true"))
    assert "[vllm-argument]" in report and "-> enforce_eager, or leave it out" in report
    report = str(refusal(RlConfig, path, "--rollout.vllm.arguments.data_parallel_size=2"))
    assert "-> write rollout.engines instead" in report


def test_all_problems_are_listed_and_a_wrong_value_outweighs_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO)
    conflicts = "--cluster.where=local --cluster.ranks=2"
    both = refusal(RlConfig, path, conflicts)
    assert both.exit_code == 4 and str(both).startswith("2 problems")
    worse = refusal(RlConfig, path, f"{conflicts} --algorithm.mini_batches=5")
    assert worse.exit_code == 2 and str(worse).startswith("3 problems")


def test_the_nearest_number_of_mini_batches_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO)
    error = refusal(RlConfig, path, "--algorithm.mini_batches=7 --batch.responses=3")
    assert "32 * 3 = 96" in str(error) and "algorithm.mini_batches: 6" in str(error)


def test_a_problem_shows_the_line_or_flag_of_the_first_key_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(PPO + "cluster: {where: local}\nrollout:\n  engines: 2\n")
    report = str(refusal(RlConfig, path, "--batch.micro_batch_tokens=9"))
    assert re.findall(r"^  (\w\S*): (\S+) +\((.*)\)$", report, re.MULTILINE) == [
        ("rollout.vllm", "given", f"cluster.where: {path}:6"),  # the engine is the default
        ("rollout.engines", "2", f"{path}:8"),
        ("batch.micro_batch_tokens", "9", "flag --batch.micro_batch_tokens"),
    ]
    path.write_text(SFT)
    assert f"data.train.prompt   ({path}:2)" in str(refusal(SftConfig, path, ""))
