"""What verl's overrides become, with numbers by hand; and keys at random: none is lost, whether
there is such a one or not."""

# ruff: noqa: E501  (a line a case)

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accounts import about, at, check_complete, check_loads, plain, unread
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert.launch import find_launches, script_launches
from plimsoll_convert.settings import settings_of
from plimsoll_convert.verl import find_program
from plimsoll_convert.verl.convert import convert
from plimsoll_convert.verl.table import SETTINGS
from plimsoll_convert.writer import Converted, config_text

Verl = Callable[..., Converted]
SFT = "torchrun --nnodes=1 --nproc_per_node=4 -m verl.trainer.sft_trainer"
BASES = {
    "ppo": "actor_rollout_ref.model.path=m critic.model.path=c "
    "data.train_files=d/gsm8k/train.parquet",
    "sft": "model.path=m data.train_files=d/train.parquet",
}
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GROUPS = (
    f"{M}.path=Qwen/Qwen3-8B {M}.use_remove_padding=True {M}.enable_gradient_checkpointing=True "
    "data.train_files=\"['d/gsm8k/train.parquet', 'd/math/train.parquet']\" "
    "data.val_files=\"['d/gsm8k/test.parquet', 'd/math/test.parquet']\" "
    "data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048 "
    "data.filter_overlong_prompts=True data.truncation='error' "
    f"{A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=256 {A}.use_dynamic_bsz=True "
    f"{A}.ppo_max_token_len_per_gpu=24576 {A}.fsdp_config.param_offload=False "
    f"{R}.name=vllm {R}.tensor_model_parallel_size=2 {R}.gpu_memory_utilization=0.6 "
    f"{R}.log_prob_use_dynamic_bsz=True trainer.n_gpus_per_node=8 trainer.nnodes=1 "
    "trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.balance_batch=True "
    'trainer.logger=\'["console","wandb"]\' trainer.project_name=p trainer.experiment_name=e'
)
COMMANDS_OF = {
    "ppo": f"{GROUPS} algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen3-8B "
    "critic.optim.lr=1e-5 critic.ppo_max_token_len_per_gpu=24576 "
    "critic.fsdp.optimizer_offload=True trainer.critic_warmup=10 "
    "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002",
    "grpo": f"{GROUPS} algorithm.adv_estimator=grpo {R}.n=5 {A}.use_kl_loss=True "
    f"{A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0 "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "dapo": f"{GROUPS} algorithm.adv_estimator=grpo {R}.n=16 {A}.clip_ratio_low=0.2 "
    f"{A}.clip_ratio_high=0.28 {A}.loss_agg_mode=token-mean {A}.clip_ratio_c=10.0 "
    "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
    "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=3072 "
    "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512 "
    "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 "
    "+reward_model.reward_kwargs.max_resp_len=2048",
    "dr_grpo": f"{GROUPS} algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
    f"{R}.n=8 {A}.loss_agg_mode=seq-mean-token-sum-norm {A}.use_kl_loss=False",
    "gspo": f"{GROUPS} algorithm.adv_estimator=grpo {A}.policy_loss.loss_mode=gspo {R}.n=16 "
    f"{A}.clip_ratio_low=0.0003 {A}.clip_ratio_high=0.0004 {A}.loss_agg_mode=seq-mean-token-mean",
    "rloo": f"{GROUPS} algorithm.adv_estimator=rloo {R}.n=4 "
    "custom_reward_function.path=my/score.py custom_reward_function.name=score",
    "remax": f"{GROUPS} algorithm.adv_estimator=remax {R}.n=4 algorithm.use_kl_in_reward=True "
    "algorithm.kl_penalty=kl",
    "reinforce": f"{GROUPS} algorithm.adv_estimator=reinforce_plus_plus {R}.n=8 "
    f"{A}.use_kl_loss=True {A}.kl_loss_type=mse algorithm.rollout_correction.rollout_is=token",
    "lora": f"{GROUPS} algorithm.adv_estimator=grpo {R}.n=5 {M}.lora_rank=64 {M}.lora_alpha=32 "
    f"{M}.target_modules=all-linear {R}.load_format=safetensors {R}.layered_summon=True "
    f"{A}.use_kl_loss=True {A}.ppo_micro_batch_size_per_gpu=4 ++{A}.use_dynamic_bsz=false",
    "megatron": f"--config-name=ppo_megatron_trainer.yaml {GROUPS} algorithm.adv_estimator=grpo "
    f"{R}.n=5 {A}.megatron.tensor_model_parallel_size=4 {A}.megatron.param_offload=True "
    f"+{A}.megatron.override_transformer_config.recompute_granularity=full ~{A}.qat",
}  # fmt: skip
DPPO = f"{A}.policy_loss.loss_mode=dppo_tv"
EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "ppo": (
        "ppo",
        {
            "cluster.ranks": 8,
            "critic.model.path": "Qwen/Qwen3-8B",
            "critic.zero": {"stage": 3, "optimizer_offload": "cpu"},
            "algorithm.advantage.options": {"gamma": 1.0, "gae_lambda": 1.0},
            "algorithm.value_clip": 0.5,
            "algorithm.critic_warmup_steps": 10,
            "algorithm.mini_batches": 4,
            "algorithm.kl.coefficient": 0.002,
            "reference.zero.stage": 3,
        },
    ),
    "grpo": (
        "grpo",
        {
            "batch": {"prompts": 1024, "responses": 5, "micro_batch_tokens": 24576},
            "data.train.math.path": "d/math/train.parquet",
            "data.eval.gsm8k.reference": "reward_model.ground_truth",
            "data.on_bad_row": "skip",
            "rollout.engines": 4,
            "rollout.vllm.sleep_level": 2,
            "actor.zero.stage": 3,
            "actor.optimizer.weight_decay": 0.01,
            "algorithm.kl": {"place": "loss", "estimator": "k3", "coefficient": 0.001},
            "algorithm.policy_loss.options.dual_clip": 3.0,
            "algorithm.correction": None,
            "reference.zero.offload": "cpu",
            "run.directory": "checkpoints/p/e",
            "eval_sampling.temperature": 0.0,
        },
    ),
    "dapo": (
        "dapo",
        {
            "algorithm.policy_loss.options": {
                "clip_low": 0.2,
                "clip_high": 0.28,
                "dual_clip": 10.0,
            },
            "batch.dynamic_sampling": {"by": "score", "oversampling": 3.0, "max_drawn": 10.0},
            "rewards.overlong.options": {"max_new_tokens": 2048, "buffer": 512, "factor": 1.0},
        },
    ),
    "dr_grpo": ("dr_grpo", {"algorithm.aggregation_tokens": 2048, "algorithm.kl": "none"}),
    "gspo": ("gspo", {"algorithm.policy_loss.options": {"clip_low": 0.0003, "clip_high": 0.0004}}),
    "rloo": (
        "rloo",
        {
            "rewards.score": {
                "name": "verl_function",
                "options": {"path": "my/score.py", "function": "score"},
            }
        },
    ),
    "remax": ("rl", {"algorithm.advantage.name": "remax", "algorithm.kl.place": "reward"}),
    "reinforce": (
        "reinforce_pp",
        {
            "algorithm.kl.estimator": "k2",
            "algorithm.correction": {
                "name": "truncate",
                "options": {"level": "token", "high": 2.0},
            },
        },
    ),
    "lora": (
        "grpo",
        {
            "actor.adapter": {"rank": 64, "targets": ("all-linear",), "alpha": 32.0},
            "batch.micro_batch_tokens": 12288,
            "reference": None,
            "rollout.vllm.sleep_level": 2,
        },
    ),
    "megatron": ("grpo", {"actor.zero.stage": 3}),
}


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_a_command_shows_every_key_and_loads(name: str, verl: Verl, tmp_path: Path) -> None:
    config = verl(COMMANDS_OF[name])
    assert about(config, "unknown") == set()
    check_loads(config, tmp_path)
    job, expected = EXPECTED[name]
    values = {key: plain(at(config, key)) for key in expected}
    assert (config.job, values) == (job, plain(expected))


@pytest.mark.parametrize(("given", "routing"), [("True", "sampled"), ("False", None)])
def test_router_replay(given: str, routing: str | None, verl: Verl) -> None:
    config = verl(f"{BASES['ppo']} {R}.enable_rollout_routing_replay={given}")
    assert at(config, "rollout.routing") == routing
    assert "enable_rollout_routing_replay" not in str(about(config, "lacking"))


def test_sft(verl: Verl) -> None:
    config = verl(
        "data.train_files=d/train.parquet data.micro_batch_size_per_gpu=4 optim.lr=1e-4 "
        "engine=fsdp data.use_dynamic_bsz=False model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "model.lora_rank=32 trainer.default_local_dir=out "
        "trainer.total_training_steps=100 trainer.logger=console",
        SFT,
    )
    assert config.job == "sft" and at(config, "cluster.ranks") == 4
    assert at(config, "batch") == {"sequences": 256, "micro_batch_tokens": 4 * 1024}
    assert at(config, "actor.optimizer.learning_rate") == 1e-4
    assert at(config, "run.steps") == 100 and at(config, "run.directory") == "out"
    config = verl(
        f"{BASES['sft']} ulysses_sequence_parallel_size=2 data.use_dynamic_bsz=False", SFT
    )
    assert at(config, "cluster.sequence_parallel") == 2
    assert at(config, "batch.micro_batch_tokens") == 4 * 1024 // 2
    old = "data.prompt_key=extra_info data.response_key=extra_info "
    old += "data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] "
    old += "model.partial_pretrain=m data.train_files=d.parquet"
    config = verl(old, "torchrun -m verl.trainer.fsdp_sft_trainer")
    assert at(config, "data.train") == {
        "path": "d.parquet",
        "prompt": "extra_info.question",
        "response": "extra_info.answer",
    }
    assert at(config, "actor.model.path") == "m"
    config = verl(f"{BASES['sft']} data.val_files=[a,b] trainer.test_freq=3", SFT)
    assert at(config, "data.eval.path") == "a" and about(config, "lacking") == {"data.val_files"}
    config = verl(f"{BASES['sft']} data.messages_key=m data.tools_key=t", SFT)
    assert at(config, "data.train.messages") == "m" and at(config, "data.train.tools") == "t"


def test_the_older_program_of_sft_has_its_own_defaults(verl: Verl) -> None:
    """They are of verl/trainer/config/sft_trainer.yaml at 005a83db."""
    old = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer"
    words = "model.partial_pretrain=m data.train_files=d.parquet data.max_length=2048"
    config = verl(words, old)
    assert config.about == "verl before 0.9.1, fsdp_sft_trainer"
    assert "own defaults" in config.version_note
    expected = {
        "actor.optimizer": {
            "learning_rate": 1e-5,
            "schedule": "cosine",
            "warmup_ratio": 0.1,
            "weight_decay": 0.01,
        },
        "batch.micro_batch_tokens": 4 * 2048,
        "data.train": {"path": "d.parquet", "prompt": "question", "response": "answer"},
        "actor.model.gradient_checkpointing": None,
    }
    assert {key: plain(at(config, key)) for key in expected} == expected
    newer = verl(f"{BASES['sft']}", SFT)
    assert at(newer, "actor.optimizer.beta2") == 0.999 and not newer.version_note
    config = verl(f"{words} data.multiturn.enable=true", old)
    assert at(config, "data.train") == {"path": "d.parquet", "messages": "messages"}
    config = verl(f"{words} data.micro_batch_size=16", old)
    assert at(config, "batch.micro_batch_tokens") == 16 // 8 * 2048


@pytest.mark.parametrize(
    ("given", "sequences", "check"),
    [
        ("ppo_micro_batch_size_per_gpu=8", 8, ""),
        ("ppo_micro_batch_size=64", 4, ""),
        ("ppo_micro_batch_size=40", 2, "40 sequences do not divide"),
        ("ppo_micro_batch_size=8", 1, "8 sequences do not divide"),
    ],
)
def test_older_micro_batches_count_all_cards(
    verl: Verl, given: str, sequences: int, check: str
) -> None:
    words = (
        f"{BASES['ppo']} algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8 trainer.nnodes=2"
    )
    config = verl(f"{words} {R}.n=2 data.max_prompt_length=1024 {A}.{given}")
    assert at(config, "batch.micro_batch_tokens") == sequences * 1536
    assert check in str([r.why for r in config.remarks if r.about == "batch.micro_batch_tokens"])


Case = tuple[str, dict[str, Any]]
C = "algorithm.rollout_correction"
GROUPED = f"{R}.n=4 algorithm.adv_estimator"
OVERLONG = "reward_model.overlong_buffer"
JUDGED = "reward_model.enable=True reward_model.model.path=org/rm"
CASES: tuple[Case, ...] = (
    ("data.train_files=~/x/train.parquet", {"data.train.path": str(Path.home() / "x/train.parquet")}),
    ("data.train_files=[a.parquet] data.train_max_samples=5", {"data.train.path": "a.parquet", "data.train.limit": 5}),
    ("data.train_files='a.parquet' data.truncation=left", {"data.train.path": "a.parquet", "data.over_long": "truncate"}),
    (f"{A}.clip_ratio=0.3", {"algorithm.policy_loss.options.clip_high": 0.2}),
    (f"{A}.clip_ratio=0.3 {A}.clip_ratio_low=null", {"algorithm.policy_loss.options.clip_low": 0.3}),
    (f"{A}.policy_loss.loss_mode=sapo", {"algorithm.policy_loss.options": {"tau_positive": 1.0, "tau_negative": 1.05}}),
    (f"{A}.optim.betas=[0.9,0.95] trainer.max_actor_ckpt_to_keep=0", {"actor.optimizer.beta2": 0.95, "run.keep_checkpoints": None}),
    (f"{A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1", {"actor.optimizer.final_ratio": 0.1}),
    (f"{A}.optim.warmup_style=constant {A}.optim.lr_warmup_steps=10", {"actor.optimizer.warmup_steps": 10}),
    (f"{A}.loss_agg_mode=seq-mean-token-sum", {"algorithm.aggregation": "constant", "algorithm.aggregation_tokens": 1}),
    (f"{A}.fsdp_config.offload_policy=True {A}.fsdp_config.reshard_after_forward=False", {"actor.zero": {"stage": 2, "optimizer_offload": "cpu"}}),
    (f"{A}.fsdp_config.offload_policy=True {A}.fsdp_config.model_dtype=bf16", {"actor.zero.parameter_offload": "cpu", "check": "actor.zero.state_dtype"}),
    (f"{A}.fsdp_config.param_offload=True critic.fsdp.model_dtype=fp16 {R}.dtype=half", {"lacking": f"{A}.fsdp_config.param_offload critic.fsdp.model_dtype {R}.dtype"}),
    (f"{R}.top_k=-1 {R}.dtype=float32 {R}.enforce_eager=True {R}.pipeline_model_parallel_size=3", {"rollout.sampling.top_k": 0, "rollout.dtype": "float32", "rollout.vllm.arguments.enforce_eager": True, "check": "rollout.engines"}),
    (f"{R}.name=hf trainer.nnodes=2", {"rollout.transformers": {"max_sequences": 256}, "cluster.nodes": 2, "check": "cluster.address"}),
    (f"{R}.val_kwargs.do_sample=True {R}.val_kwargs.temperature=1.0 trainer.test_freq=5", {"eval_sampling": {"temperature": 1.0}, "run.eval_every": 5}),
    ("reward_model.enable=True reward_model.model.path=org/rm reward_model.model.trust_remote_code=True", {"reward_model.role": {"model": {"path": "org/rm", "trust_remote_code": True}, "zero": {"stage": 3}}, "data.train.reference": None}),
    # sequences on several cards, and MLPs in tiles: 2 sequences of 1,024 tokens on 2 cards in 3 tiles
    (f"{A}.ulysses_sequence_parallel_size=2 {A}.ppo_micro_batch_size_per_gpu=2 {M}.tiled_mlp.enabled=True {M}.tiled_mlp.num_shards=3", {"cluster": {"ranks": 8, "sequence_parallel": 2}, "batch.micro_batch_tokens": 1024, "actor.model.mlp_tile": 342}),
    (f"{A}.fsdp_config.ulysses_sequence_parallel_size=4 {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=64 critic.ulysses_sequence_parallel_size=4 actor_rollout_ref.ref.ulysses_sequence_parallel_size=1", {"cluster.sequence_parallel": 4, "batch.micro_batch_tokens": 256, "lacking": "actor_rollout_ref.ref.ulysses_sequence_parallel_size"}),
    (f"{A}.ulysses_sequence_parallel_size=4 {A}.ppo_micro_batch_size=8", {"batch.micro_batch_tokens": 4 * 1024 // 4}),
    # the experts that engines took, and those that the trainer took
    (f"{A}.megatron.router_replay.mode=R3 {R}.enable_rollout_routing_replay=True", {"rollout.routing": "sampled"}),
    (f"{A}.router_replay.mode=R2", {"rollout.routing": None, "lacking": f"{A}.router_replay.mode"}),
    # the reward model's own pool
    (f"{JUDGED} reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=8 reward_model.nnodes=2", {"cluster": {"ranks": 8, "reward_ranks": 16, "nodes": 3}, "check": "cluster.address"}),
    (f"{JUDGED} reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=4 reward_model.nnodes=1 trainer.n_gpus_per_node=4", {"cluster": {"ranks": 4, "reward_ranks": 4, "nodes": 2}}),
    (f"{JUDGED} reward_model.n_gpus_per_node=4 reward_model.nnodes=1", {"cluster": {"ranks": 8}, "idle": "reward.reward_model.nnodes"}),
    ("reward.reward_model.enable_resource_pool=True reward.reward_model.nnodes=1", {"cluster": {"ranks": 8}, "idle": "reward.reward_model.enable_resource_pool"}),
    (f"{C}.rollout_is=sequence {C}.rollout_is_threshold=0.5_5.0", {"algorithm.correction": {"name": "mask", "options": {"level": "sequence", "low": 0.5, "high": 5.0}}}),
    (f"{A}.tis_imp_ratio_cap=3", {"algorithm.correction": {"name": "truncate", "options": {"level": "token", "high": 3.0}}}),
    (f"{C}.bypass_mode=True {C}.rollout_rs=token", {"lacking": f"{C}.bypass_mode {C}.rollout_rs"}),
    ("algorithm.kl_ctrl.type=adaptive algorithm.use_kl_in_reward=True", {"algorithm.kl.adaptive.target": 0.1, "algorithm.kl.adaptive.per": "token", "unchecked": "algorithm.kl.place"}),
    (f"{A}.use_kl_loss=True {A}.kl_loss_type=low_var_kl+ algorithm.use_kl_in_reward=True", {"algorithm.kl.ratio_corrected": True, "lacking": "algorithm.use_kl_in_reward"}),
    # thresholds of dppo have the names of clips, and its ratio is against the sampler
    (f"{DPPO} {C}.rollout_is=token", {
        "algorithm.policy_loss": {"name": "dppo_tv", "options": {"threshold": 0.2, "threshold_low": 0.2, "cap": 3.0, "penalty": 0.0}},
        "algorithm.correction": None,
        "idle": f"{C}.rollout_is",
        "check": "algorithm.policy_loss.name",
    }),
    (f"{DPPO} {A}.clip_ratio_low=0.15 {A}.clip_ratio_high=0.25 {A}.clip_ratio_c=20 {C}.bypass_mode=True", {
        "algorithm.policy_loss.options": {"threshold": 0.25, "threshold_low": 0.15, "cap": 20, "penalty": 0.0},
        "unchecked": "algorithm.policy_loss.name",
    }),
    (f"{DPPO} {A}.clip_ratio=0.3 {A}.clip_ratio_low=null", {"algorithm.policy_loss.options.threshold_low": 0.3}),
    # a KL in the reward of a group counts otherwise
    *((f"{GROUPED}={name} algorithm.use_kl_in_reward=True", {"check": "algorithm.kl.place"}) for name in ("grpo", "grpo algorithm.norm_adv_by_std_in_grpo=False", "rloo", "reinforce_plus_plus_baseline")),
    *((f"{GROUPED}={name} algorithm.use_kl_in_reward=True", {"unchecked": "algorithm.kl.place"}) for name in ("reinforce_plus_plus", "remax")),
    (f"{GROUPED}=gdpo algorithm.use_kl_in_reward=True", {"algorithm.kl": "none", "reference": None}),
    (f"{GROUPED}=gdpo algorithm.use_kl_in_reward=True {A}.use_kl_loss=True", {"algorithm.kl.place": "loss", "reference.zero.stage": 3}),
    # batches, and what is kept
    (f"{A}.ppo_micro_batch_size_per_gpu=null critic.ppo_mini_batch_size=128", {"algorithm.critic_mini_batches": 8, "check": "batch.micro_batch_tokens"}),
    (f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=64", {"batch.micro_batch_tokens": 1024}),
    (f"{GROUPED}=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_std", {"batch.dynamic_sampling": {"max_drawn": 4.0}, "lacking": "algorithm.filter_groups.metric"}),
    ("trainer.save_freq=after_each_epoch trainer.resume_mode=disable trainer.logger=[wandb,swanlab] trainer.resume_from_path=x", {"run.resume": "never", "run.loggers": ("wandb",), "check": "run.save_every", "lacking": "trainer.logger trainer.resume_from_path"}),
    # of two names of a key the last one counts
    ("custom_reward_function.path=a.py reward.custom_reward_function.path=b.py", {"rewards.score.options.path": "b.py", "idle": "custom_reward_function.path=a.py"}),
    # keys that there are not
    (f"{A}.ppo_mini_batchsize=4 +trainer.foo=1 data.rollout.n=2 stray ~x.y --config-path x", {"unknown": f"{A}.ppo_mini_batchsize=4 trainer.foo=1 data.rollout.n=2 stray", "check": "'~x.y'"}),
)  # fmt: skip


def test_settings_become_keys(verl: Verl) -> None:
    """`idle`, `lacking`, `unknown` and `check` are what remarks are about."""
    for words, expected in CASES:
        config = verl(f"{BASES['ppo']} {words}")
        for key, value in expected.items():
            if key in ("idle", "lacking", "unknown", "check"):
                assert set(str(value).split()) <= about(config, key), (words, config.remarks)
            elif key == "unchecked":
                assert value not in about(config, "check"), words
            else:
                assert plain(at(config, key)) == plain(value), (words, key)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algorithm.adv_estimator=opo", "=opo: not supported: known are gae"),
        (f"{A}.policy_loss.loss_mode=kl_cov", "known are vanilla"),
        (f"{A}.loss_agg_mode=token-sum", "loss_agg_mode=token-sum: not supported"),
        (f"{A}.ppo_mini_batch_size=300", r"does not divide the 1024 prompts .* Nearest: .*size=256"),
        (f"{A}.ulysses_sequence_parallel_size=3", "8 ranks are no multiple of the 3 that share a sequence"),
        (f"{A}.ppo_epochs=x", r"ppo_epochs: x\n      It must be a whole number"),
        (f"{A}.ppo_epochs=$E", "--set gives a variable of the script"),
        (f"{A}.ppo_epochs=[1,2]", "It takes 1 word: quote the value"),
        (f"{A}.use_kl_loss=maybe", "It must be true or false"),
        (f"{R}.tensor_model_parallel_size=16", "16 cards, and there are 8"),
        (f"{R}.multi_turn.enable=True", "given by `environments`"),
        (f"{A}.optim.optimizer=SGD", "weights are trained by AdamW"),
        ("data.image_key=images", "images, video and sound cannot be read"),
        ("reward_model.enable=True", "model_path is needed"),
        (f"{JUDGED} reward_model.enable_resource_pool=True", "nnodes=0: the pool has no cards"),
        ("data.train_files=null", "data.train_files is needed"),
        (f"{M}.path=", "give the model to train"),
        (f"{A}.ppo_epochs=[1", "It must be a list, such as"),
        (f"{A}.optim.lr_scheduler_type=poly", "there is no such schedule here"),
        ("algorithm.rollout_correction.rollout_is=word", "It must be token, sequence or null"),
        ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=x", "It must be a number, or two"),
        ("reward.reward_manager.name=mine", "not supported: known are naive"),
        (f"{OVERLONG}.enable=True", "the buffer's length"),
        ("trainer.save_freq=often", "It must be a whole number of steps"),
        ("algorithm.kl_penalty=full algorithm.use_kl_in_reward=True", "known are kl, k1"),
        ("algorithm.adv_estimator=grpo", r"batch\.responses: 1   \(actor_rollout_ref\.rollout\.n=1\)"),
    ],
)  # fmt: skip
def test_settings_without_a_counterpart_are_refused_with_the_reason(
    words: str, message: str, verl: Verl
) -> None:
    with pytest.raises(PlimsollError, match=message):
        verl(f"{BASES['ppo']} {words}")


def test_programs_that_train_nothing_or_otherwise_are_refused(verl: Verl) -> None:
    with pytest.raises(ConfigError, match="`plimsoll sample CONFIG` samples"):
        verl("", "python -m verl.trainer.main_generation")
    with pytest.raises(ConfigError, match=r"rollout\.staleness"):
        verl("", "python -m verl.experimental.fully_async_policy.fully_async_main")


def test_what_is_near_is_named(verl: Verl) -> None:
    text = config_text(
        verl(f"{BASES['ppo']} {A}.ppo_mini_batchsize=4 +trainer.foo=1 data.rollout.n=2")
    )
    assert f"did you mean {A}.ppo_mini_batch_size" in text and f"{R}.n" in text
    assert "# left out: trainer.foo=1: no such key" in text


def test_scripts_of_verls_form(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}\n"
        "n=${N:-}\nEXTRA=()\n"
        'case "${DEVICE}" in\n'
        "  gpu)\n    n=${n:-4}\n    ;;\n"
        f"  npu)\n    n=16\n    EXTRA+=({A}.use_torch_compile=False)\n    ;;\nesac\n"
        f"DATA=(\n  data.train_files=\"['$HOME/d/a.parquet']\"\n)\n"
        f'python3 -m verl.trainer.main_ppo "${{DATA[@]}}" {M}.path=m critic.model.path=c \\\n'
        '    trainer.n_gpus_per_node=$n "${EXTRA[@]}" "$@"\n'
    )
    [launch] = script_launches(str(file), {"DEVICE": "gpu"}, find_program)
    config = convert(launch)
    assert at(config, "cluster.ranks") == 4
    assert at(config, "data.train.path") == str(Path.home() / "d/a.parquet")
    assert about(config, "unknown") == set() and "the script" not in about(config, "check")


def test_every_name_is_of_one_setting_and_is_read() -> None:
    for command in BASES:
        names = [
            name
            for setting in settings_of(SETTINGS, command)
            for name in (setting.name, *setting.older)
        ]
        assert sorted({name for name in names if names.count(name) > 1}) == []
    assert unread(SETTINGS, "plimsoll_convert.verl", ("table.py",)) == []


VALUES: tuple[str, ...] = (
    "-1",
    "0",
    "1",
    "8",
    "64",
    "0.5",
    "1e-6",
    "nan",
    "x",
    "a/b",
    "",
    "True",
    "null",
    "\n",
    "[]",
)
VALUES += ("[1,2]", "['a', 'b']", "[", "'", "${x.y}", "cosine", "token", "seq-mean-token-mean")


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A command with keys that it has, or nearly has, and values that it may not like."""
    command = draw(st.sampled_from(sorted(BASES)))
    words = shlex.split(BASES[command])
    names = st.sampled_from(
        [setting.name for setting in settings_of(SETTINGS, command) if "-" not in setting.name]
    )
    made_up = st.text(st.sampled_from("abcdegilmnoprstuz_.-+~=@"), min_size=1, max_size=16)
    for name in draw(st.lists(names | names | made_up, max_size=8)):
        start = draw(st.sampled_from(("", "+", "++")))
        words.append(f"{start}{name}={draw(st.sampled_from(VALUES))}")
    return command, tuple(words)


@settings(max_examples=percent(60))
@given(commands())
def test_no_key_is_lost(made: tuple[str, tuple[str, ...]]) -> None:
    command, words = made
    start = ("python3", "-m", "verl.trainer.main_ppo") if command == "ppo" else tuple(SFT.split())
    [launch] = find_launches([*start, *words], find_program)
    try:
        config = convert(launch)
    except PlimsollError as error:
        assert len(str(error)) > 20
        return
    check_complete(config)
    texts = " ".join([*config.typed, *(setting.about for setting in config.remarks)])
    assert all(word.lstrip("+").partition("=")[0] in texts for word in words)
