"""What OpenRLHF's flags become, with numbers by hand."""

# ruff: noqa: E501  (a line a case)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from accounts import about, at

from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll_convert.openrlhf.sections import as_jinja
from plimsoll_convert.writer import Converted

Convert = Callable[..., Converted]
NEW = "openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p "
REINFORCE = "--advantage_estimator reinforce"
REMOTE = "--remote_rm_url http://h/r"
GROUP = "--advantage_estimator group_norm --n_samples_per_prompt"
LEVEL = "--algo.advantage.estimator reinforce --reward.remote_url http://h/r"
LEVEL += " --algo.advantage.is_correction_level"
RM = "openrlhf.cli.train_rm --pretrain m --dataset d"
SEQ = {"level": "geometric", "kept": "token"}
Case = tuple[str, str | None, str, dict[str, Any]]
CASES: tuple[Case, ...] = (
    # micro-batches of sequences become tokens
    ("ppo", None, "--micro_train_batch_size 8 --prompt_max_len 100 --generate_max_len 28", {"batch.micro_batch_tokens": 1024}),
    ("ppo", None, "--use_dynamic_batch --train_max_tokens_per_gpu 5000 --prompt_max_len 1000", {"batch.micro_batch_tokens": 5000}),
    ("ppo", None, "--use_dynamic_batch --train_max_tokens_per_gpu 500 --prompt_max_len 1000", {"batch.micro_batch_tokens": 2024}),
    ("sft", None, "--micro_train_batch_size 2 --max_len 3000", {"batch.micro_batch_tokens": 6000}),
    ("rm", None, "--micro_train_batch_size 2 --max_len 1000", {"batch.micro_batch_tokens": 4000}),
    ("dpo", None, "--max_len 100", {"batch.micro_batch_tokens": 1600}),
    ("kto", None, "", {"batch.micro_batch_tokens": 16384}),
    # lengths of prompt and response
    ("ppo", "0.9.7", "--prompt_max_len 300 --generate_max_len 700", {"data.max_tokens": 300, "rollout.sampling.max_new_tokens": 700}),
    ("ppo", "0.9.8", "--max_len 1000 --max_new_tokens 700", {"data.max_tokens": 300, "rollout.sampling.max_new_tokens": 700}),
    ("ppo", "0.10.1", "--max_len 1001", {"data.max_tokens": 500, "rollout.sampling.max_new_tokens": 501}),
    ("ppo", None, "--prompt_max=64 --generate_m 32 --init_kl=0.5 --eval_steps -1", {"data.max_tokens": 64, "rollout.sampling.max_new_tokens": 32, "algorithm.kl.coefficient": 0.5}),
    # batches of a step
    ("ppo", "0.9.0", "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 32 --max_epochs 2 --num_episodes 3", {
        "batch": {"prompts": 64, "responses": 4, "micro_batch_tokens": 4 * 2048},
        "algorithm.mini_batches": 8,  # 64 * 4 / 32
        "algorithm.epochs": 2,
        "run.epochs": 3.0,
    }),
    # estimators
    ("ppo", "0.8.0", "", {"job": "ppo", "algorithm.advantage.name": None, "critic.model.path": "a/r"}),
    ("ppo", "0.8.0", REINFORCE, {"job": "reinforce_pp", "critic": None}),
    ("ppo", "0.9.0", "--advantage_estimator rloo --n_samples_per_prompt 2", {"job": "rloo"}),
    # until 0.8.4 it is whitened over the batch
    ("ppo", "0.8.4", "--advantage_estimator rloo --n_samples_per_prompt 2", {"job": "rl", "algorithm.advantage.name": "reinforce_pp_baseline"}),
    ("ppo", "0.8.0", "--advantage_estimator reinforce_baseline --n_samples_per_prompt 2", {"job": "rl", "algorithm.advantage.name": "reinforce_pp_baseline"}),
    ("ppo", "0.8.0", f"{GROUP} 2", {"job": "grpo", "algorithm.advantage.name": "grpo"}),
    ("ppo", "0.8.0", "--advantage_estimator dr_grpo --n_samples_per_prompt 2", {"job": "dr_grpo"}),
    ("ppo", "0.9.0", f"{GROUP} 2 --policy_loss_type gspo", {"job": "gspo", "algorithm.advantage.name": "grpo"}),
    ("ppo", "0.9.0", f"{GROUP} 8 --dynamic_filtering --eps_clip_low_high 0.2 0.28 --remote_rm_url f.py", {
        "job": "dapo",
        "batch.dynamic_sampling": {"low": 0.0, "high": 1.0},
        "algorithm.policy_loss.options": {"clip_low": 0.2, "clip_high": 0.28},
    }),
    ("", None, f"{NEW} --reward.remote http://h/r --algo.advantage.est flash_reinforce", {"job": "rl", "algorithm.advantage.name": "batch_mean"}),
    # corrections
    ("ppo", "0.9.0", f"{REINFORCE} --enable_vllm_is_correction", {"algorithm.correction": {"name": "truncate", "options": {"high": 2.0}}}),
    ("ppo", "0.9.1", f"{REINFORCE} --enable_vllm_is_correction --use_icepop", {"algorithm.correction": {"name": "icepop", "options": {"low": 0.5, "high": 5.0}}}),
    ("ppo", "0.9.4", f"{REINFORCE} --enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis", {"algorithm.correction": {"name": "mask", "options": {**SEQ, "low": 0.5, "high": 5.0}}}),
    ("ppo", "0.9.4", REINFORCE, {"algorithm.correction": None}),
    ("", None, f"{NEW}{LEVEL} token --algo.advantage.is_correction_mode clip --algo.advantage.is_correction_threshold 2", {"algorithm.correction": {"name": "truncate", "options": {"high": 2.0}}}),
    ("", None, f"{NEW}{LEVEL} seq --algo.advantage.is_correction_threshold 0.9 1.1", {"algorithm.correction": {"name": "mask", "options": {**SEQ, "low": 0.9, "high": 1.1}}}),
    ("", None, f"{NEW}{LEVEL} seq --algo.advantage.is_correction_gating binary_kl", {"algorithm.correction": None, "lacking": "is_correction_gating"}),
    ("ppo", "0.9.0", f"{GROUP} 2 --policy_loss_type gspo --dual_clip 3 --enable_vllm_is_correction", {"algorithm.correction": None, "lacking": "dual_clip enable_vllm_is_correction"}),
    # KL
    ("ppo", None, "--init_kl_coef 0.02 --use_kl_loss --kl_estimator k2", {"algorithm.kl": {"place": "loss", "estimator": "k2", "coefficient": 0.02}}),
    ("ppo", None, "--init_kl_coef 0 --use_kl_loss", {"algorithm.kl": "none", "reference": None, "idle": "use_kl_loss"}),
    ("ppo", None, "--init_kl_coef 0.02 --kl_target 0.1 --kl_horizon 5000", {"algorithm.kl": {"coefficient": 0.02, "adaptive": {"target": 0.1, "per": "token", "horizon": 5000}}}),
    ("ppo", None, "--kl_horizon 500", {"idle": "kl_horizon"}),
    ("", None, f"{NEW} --reward.model_name_or_path r --algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.init_coef 0.1", {"algorithm.kl": {"place": "loss", "coefficient": 0.1, "ratio_corrected": True}}),
    # defaults that differ are written, and others left out
    ("ppo", "0.8.2", "", {
        "critic.optimizer.learning_rate": 9e-6,
        "actor.optimizer": {"schedule": "cosine", "warmup_ratio": 0.03, "final_ratio": 0.1},
        "algorithm.advantage.options.gae_lambda": 1.0,
        "algorithm.value_clip": 0.5,
        "algorithm.aggregation": None,  # tokens in both
        "algorithm.correction": None,
    }),
    # warm-up of the critic counts from 1 until 0.9.0
    ("ppo", "0.9.0", "--freezing_actor_steps 5", {"algorithm.critic_warmup_steps": 5}),
    ("ppo", "0.9.1", "--freezing_actor_steps 5 --bf16", {"algorithm.critic_warmup_steps": 6, "actor.model.dtype": "bfloat16"}),
    ("ppo", "0.9.2", "--param_dtype bf16 --enable_ema", {"actor.model.dtype": "bfloat16", "actor.ema.decay": 0.992}),
    ("ppo", "0.9.2", "--param_dtype fp16", {"lacking": "param_dtype"}),
    # schedules
    ("dpo", "0.9.0", "--lr_scheduler linear", {"actor.optimizer.schedule": "linear", "actor.optimizer.final_ratio": None}),
    ("dpo", "0.9.0", "--lr_scheduler constant --lr_warmup_ratio 0.2", {"actor.optimizer.warmup_ratio": None, "idle": "lr_warmup_ratio"}),
    ("dpo", "0.9.0", "--lr_scheduler constant_with_warmup", {"actor.optimizer.warmup_ratio": 0.03}),
    ("dpo", "0.9.0", "--lr_warmup_ratio 0.1 --min_lr_ratio 0.2", {"actor.optimizer": {"learning_rate": 1e-5, "schedule": "cosine", "warmup_ratio": 0.1, "final_ratio": 0.2}}),
    # where roles live: 16 of the actor's, 8 of the critic's, 8 of the reward model's, 16 of the
    # engines' are 6 machines of 8
    *(
        ("ppo", "0.8.0", f"--actor_num_nodes 2 --actor_num_gpus_per_node 8 --critic_num_nodes 1 --vllm_num_engines 8 --vllm_tensor_parallel_size 2 --vllm_enable_sleep{more}", expected)
        for more, expected in (
            ("", {"cluster": {"ranks": 16, "critic_ranks": 8, "reward_ranks": 8, "nodes": 6}, "rollout.placement": None, "check": "cluster.address"}),
            (" --reward_num_nodes 3 --reward_num_gpus_per_node 2", {"cluster.reward_ranks": 6, "cluster.nodes": 6}),
            (" --reward_pretrain a,b --reward_num_gpus_per_node 2", {"cluster.reward_ranks": 4, "cluster.nodes": 6}),
            (" --colocate_critic_reward", {"cluster": {"ranks": 16, "critic_ranks": 8, "nodes": 5}, "lacking": "colocate_critic_reward"}),
            (f" --colocate_critic_reward {REINFORCE}", {"cluster": {"ranks": 16, "reward_ranks": 8, "nodes": 5}, "idle": "colocate_critic_reward"}),
            (" --colocate_all_models", {"cluster": {"ranks": 16, "nodes": 2}, "rollout.placement": "shared", "rollout.vllm.sleep_level": 2}),
            (" --colocate_all_models --deepspeed_enable_sleep", {"cluster": {"ranks": 16, "nodes": 2, "rank_sleep": "states"}}),
            (" --deepspeed_enable_sleep", {"cluster": {"ranks": 16, "critic_ranks": 8, "reward_ranks": 8, "nodes": 6}, "idle": "deepspeed_enable_sleep", "check": "cluster.address"}),
            (" --colocate_all_models --async_train", {"cluster": {"ranks": 16, "nodes": 4}, "lacking": "async_train"}),
        )
    ),
    ("ppo", "0.8.0", f"{REMOTE} --reward_num_nodes 0 --enforce_eager --vllm_num_engines 1", {"cluster": {"ranks": 8, "critic_ranks": 8, "nodes": 3}, "idle": "reward_num_nodes", "rollout.vllm.arguments.enforce_eager": True}),
    ("ppo", "0.8.0", f"{REINFORCE} --init_kl_coef 0 --critic_num_nodes 0", {"cluster": {"ranks": 8, "reward_ranks": 8, "nodes": 2}, "rollout.transformers": {}}),
    ("", None, f"torchrun --nproc_per_node 4 --nnodes 2 -m {RM}", {"cluster": {"ranks": 8, "nodes": 2}}),
    ("", None, f"deepspeed --module {RM}", {"cluster": {"ranks": 8}, "check": "cluster.ranks"}),
    ("", None, f"ray job submit --address http://head:8265 -- {NEW} --reward.remote_url f.py --actor.num_nodes 2", {"cluster.address": "head:6379"}),
    # sequences on several cards
    ("ppo", "0.8.0", "--actor_num_gpus_per_node 8 --ring_attn_size 4 --ring_head_stride 2 --micro_train_batch_size 2 --prompt_max_len 1000 --generate_max_len 1001 --packing_samples", {"cluster.sequence_parallel": 4, "batch.micro_batch_tokens": 1001, "idle": "ring_head_stride"}),
    # references, adapters and offloads
    ("dpo", None, "--zero_stage 3 --ref_offload --adam_offload --zpg 8", {
        "reference": {"model": {"path": "a/m"}, "zero": {"stage": 3, "offload": "cpu"}},
        "actor.zero": {"stage": 3, "optimizer_offload": "cpu", "hpz_partition_size": 8, "gradient_dtype": "bfloat16"},
    }),
    ("dpo", None, "", {"reference": None}),
    ("dpo", None, "--ref_pretrain r --grad_accum_dtype fp32 --load_in_4bit --lora_rank 8", {"reference.model": {"path": "r", "quantization": "nf4"}, "actor.zero.gradient_dtype": "float32"}),
    ("dpo", None, "--zero_stage 0 --grad_accum_dtype fp32", {"actor.zero.gradient_dtype": None}),
    ("dpo", None, "--lora_rank 8 --lora_alpha 16 --zero_stage 3 --target_modules q_proj", {"reference": None, "actor.adapter": {"rank": 8, "alpha": 16.0, "targets": ("q_proj",)}}),
    ("ppo", None, "--critic_pretrain c --reward_pretrain a,b --ref_reward_offload --zero_stage 3", {"critic.model.path": "c", "reward_models.model_2.role": {"model": {"path": "b"}, "zero": {"stage": 3, "offload": "cpu"}}}),
    # rewards
    ("ppo", "0.8.0", f"--remote_rm_url http://h:5/a,http://i/b {REINFORCE}", {"rewards.remote": {
        "http": {"urls": ("http://h:5/a", "http://i/b"), "format": "openrlhf", "tokenizer": "a/m", "time_limit": 180.0},
        "clip": (-10.0, 10.0),
    }}),
    ("ppo", "0.10.0", f"--remote_rm_url /x/f.py --stop_properly_penalty_coef -0.5 --overlong_buffer_len 100 --max_new_tokens 1000 {GROUP} 2", {"rewards": {
        "reward_func": {"name": "openrlhf_function", "options": {"path": "/x/f.py", "tokenizer": "a/m"}, "truncated_factor": 0.0},
        "overlong": {"name": "overlong", "options": {"max_new_tokens": 1000, "buffer": 100, "factor": 1.0}, "truncated_factor": 0.0},
        "length": {"name": "length", "options": {"value": -0.5}},
    }}),
    ("ppo", "0.10.0", "--stop_properly_penalty_coef 0.5 --normalize_reward --value_head_prefix v --vllm_generate_batch_size 4096 --no_advantage_std_norm", {"lacking": "stop_properly_penalty_coef reward_clip_range normalize_reward value_head_prefix vllm_generate_batch_size no_advantage_std_norm"}),
    ("ppo", "0.8.0", f"--agent_func_path agent.py --prompt_max_len 100 --generate_max_len 300 {REINFORCE}", {
        "environments.agent": {"name": "agent.py", "max_turns": 150, "max_tokens": 300, "tool_format": "none"},
        "rewards": None,
        "reward_model": None,
    }),
    ("ppo", "0.10.0", f"--agent_func_path agent.py --max_new_tokens 300 --overlong_buffer_len 50 {REINFORCE}", {"rewards.overlong.options": {"max_new_tokens": 300, "buffer": 50, "factor": 1.0, "observations": True}}),
    # columns
    ("ppo", "0.9.0", "--input_key q --label_key a", {"data.train": {"path": "a/p", "prompt": "q", "reference": "a"}}),
    ("ppo", "0.9.0", "--input_key context_messages --apply_chat_template", {"data.train": {"path": "a/p", "messages": "context_messages"}, "check": "data.train.messages"}),
    ("sft", "0.9.0", "--input_key q", {"data.train": {"path": "a/d", "prompt": "q", "response": "out", "limit": 10**6}}),
    ("sft", "0.9.0", "--input_key t --pretrain_mode", {"data.train.text": "t", "data.chat_template": None}),
    ("sft", "0.9.0", "--multiturn --apply_chat_template", {"data.train.messages": "input", "lacking": "output_key"}),
    ("rm", "0.9.0", "--margin_loss --loss logexp", {"data.train.margin": "margin", "algorithm.loss.name": "log_exp", "lacking": "margin_loss"}),
    ("dpo", "0.9.0", "--prompt_key p", {"data.train.prompt": "p", "data.train.rejected": "rejected"}),
    ("kto", "0.9.0", "--input_key q --dataset a.csv", {"data.train.prompt": "q", "data.train.response": "out", "data.train.label": "label", "check": "data.train.path"}),
    # templates
    ("rm", None, "", {"data.chat_template": "none"}),
    ("rm", None, "--apply_chat_template", {"data.chat_template": None}),
    ("rm", "0.9.0", "--apply_chat_template --tokenizer_chat_template '{{ messages }}'", {"data.chat_template": "{{ messages }}"}),
    ("sft", None, "", {"data.chat_template": as_jinja("User: {}\nAssistant: ")}),
    ("sft", None, "--input_template Q", {"data.chat_template": "none"}),
    # held-out rows, and what is kept
    ("ppo", "0.9.9", "--remote_rm_url f.py --eval_dataset e.jsonl --eval_steps 5 --eval_temperature 0.7 --top_p 0.9 --label_key a", {
        "data.eval": {"path": "e.jsonl", "prompt": "input", "reference": "a", "responses": 4},
        "eval_sampling": {"max_new_tokens": 1024, "temperature": 0.7, "top_p": 0.9},
        "run.eval_every": 5,
        "run.best.metric": "eval/reward",
        "lacking": "top_p",
    }),
    ("ppo", "0.9.8", "--eval_dataset e.jsonl", {"data.eval": None, "idle": "eval_dataset"}),
    ("ppo", "0.9.8", "--eval_dataset x/e.jsonl,f.jsonl --eval_steps 5", {"data.eval.f.path": "f.jsonl"}),
    ("dpo", None, "--eval_dataset e.jsonl --max_samples 1000 --train_batch_size 100", {"run.eval_every": 10, "data.eval.split": "test"}),
    ("dpo", None, "--eval_dataset e.jsonl,f.jsonl --use_ms", {"data.eval.path": "e.jsonl", "check": "run.eval_every data.train.path", "lacking": "eval_dataset"}),
    ("sft", None, "--use_wandb SECRET --wandb_project p --save_steps 5", {"run.loggers": ("wandb",), "run.logger_project": "p", "run.save_every": 5}),
    # losses of pairs, labels and teachers
    ("dpo", None, "--ipo --beta 0.2 --nll_loss_coef 0.1", {"algorithm": {"loss": {"name": "ipo", "options": {"beta": 0.2}}, "nll_weight": 0.1}}),
    ("dpo", None, "--label_smoothing 0.1", {"algorithm.loss.options": {"label_smoothing": 0.1}}),
    ("kto", None, "--desirable_loss_weight 2", {"algorithm.loss.options": {"beta": 0.01, "desirable_weight": 2.0}}),
    ("kd", None, "--kd_coef 0.75 --teacher_offload --zero_stage 3", {"job": "distill", "algorithm.nll_share": 0.25, "teacher": {"model": {"path": "a/t"}, "zero": {"stage": 3, "offload": "cpu"}}}),
)  # fmt: skip


def test_flags_become_keys(converted: Convert) -> None:
    """`job` is the command; `idle`, `lacking` and `check` are what remarks are about."""
    for of, version, words, expected in CASES:
        config = converted(words, version, of=of or None)
        for key, value in expected.items():
            if key in ("idle", "lacking", "check"):
                assert set(str(value).split()) <= about(config, key), (words, config.remarks)
            else:
                assert (config.job if key == "job" else at(config, key)) == value, (words, key)
        assert "SECRET" not in f"{config.shown}{config.entries}{config.remarks}"


def test_sources(converted: Convert) -> None:
    words = "openrlhf.cli.train_sft --pretrain m --output_key o --dataset ./a@b,org/c@d,e.jsonl"
    config = converted(f"{words} --dataset_probs 0.5,0.3,0.2 --max_samples 100")
    shared = {"prompt": "input", "response": "o", "limit": 100}
    assert at(config, "data.train") == {
        "b": {"path": "./a/b", **shared, "weight": 0.5},
        "c": {"path": "org/c", "name": "d", **shared, "weight": 0.3},
        "e": {"path": "e.jsonl", **shared, "weight": 0.2},
    }
    assert {"data.train", "data.train.c.name"} <= about(converted(words), "check")


@pytest.mark.parametrize("text", ["User: {}\nAssistant: ", '"q" {} \\ é', "{}", "{{% x %}}{}{{"])
def test_an_input_template_as_jinja_writes_what_format_does(text: str) -> None:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    template = jinja2.Environment().from_string(as_jinja(text))
    prompt = text.format("2+2?")
    assert template.render(messages=turns[:1], eos_token="</s>") == prompt
    assert template.render(messages=turns, eos_token="</s>") == f"{prompt}4</s>"


NONE = "--critic_num_nodes 0 --critic_num_gpus_per_node 0"


@pytest.mark.parametrize(
    ("of", "version", "words", "message"),
    [
        ("ppo", "0.10.1", "--max_len 1000 --max_new_tokens 1000", "no room is left"),
        ("ppo", None, "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 96", r"--train_batch_size 96 .* 256 .*Nearest: --train_batch_size 64\."),
        ("ppo", "0.8.0", NONE, "critic_ranks: 0 .*--critic_num_nodes 0"),
        ("ppo", "0.8.0", "--reward_num_nodes 0", "reward_ranks: 0 .*--reward_num_nodes 0"),
        ("ppo", None, "--use_kl_loss --kl_estimator k1", r"\(--kl_estimator k1\)"),
        ("sft", None, "--lr_scheduler polynomial", "--lr_scheduler polynomial: there is"),
        ("sft", None, "--grad_accum_dtype int8", "--grad_accum_dtype int8: known are bf16"),
        ("sft", None, "--dataset a,b --dataset_probs 1", "2 numbers are needed"),
        ("sft", None, "--dataset a,b --dataset_probs 1,x", "--dataset_probs 1,x: could not convert"),
        ("sft", None, "--dataset ''", "--dataset is needed"),
        ("", None, "openrlhf.cli.train_kd --pretrain m --dataset d --output_key o", "--teacher_model is needed"),
        ("", None, "openrlhf.cli.train_sft --dataset d", "--pretrain is needed"),
        ("", None, "openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d --data.output_key o --optim muon", "--optim: muon\n      Not supported: .* AdamW"),
        ("", "0.8.0", "openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p", "Nothing scores the responses"),
        ("", None, "openrlhf.cli.serve_rm --reward_pretrain m", "`plimsoll serve-reward CONFIG`"),
        ("kto", "0.11.0", "", "no train_kto: it is in 0.8.0 to 0.9.5"),
    ],
)  # fmt: skip
def test_settings_without_a_counterpart_are_refused_with_the_reason(
    of: str, version: str | None, words: str, message: str, converted: Convert
) -> None:
    with pytest.raises((ConfigError, SettingsConflict), match=message):
        converted(words, version, of=of or None)
