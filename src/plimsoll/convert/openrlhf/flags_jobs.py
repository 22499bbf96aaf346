"""Flags of single commands: PPO and its kin, reward models, preferences, distillation."""

from __future__ import annotations

from plimsoll.convert.openrlhf import algorithm, batches, pairs, rewards, roles, rows
from plimsoll.convert.openrlhf.flag import Flag, always, each, moved
from plimsoll.convert.setting import (
    BOUNDS,
    COUNT,
    NUMBER,
    PAIR,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    Idle,
    Key,
    Lacking,
    Part,
    Read,
    Same,
    one_of,
)

# fmt: off
# ruff: noqa: E501  (a line a flag)

_RL = "ppo local"
_SAME_PACKS = Idle("what is scored is packed as what is learned")


_CARDS = Read(int, lowest=0)
"""Of a group of cards; 0: the command has no such group."""


def _groups(role: str, rule: Part) -> tuple[Flag, ...]:
    names = ("num_nodes", "num_gpus_per_node")
    return tuple(
        Flag(f"{role}_{name}", f"{role}.{name}", "ppo", _CARDS, rule, always(default))
        for name, default in zip(names, (1, 8), strict=True)
    )


_PLACES = (
    *(flag for role in ("actor", "critic", "ref", "reward") for flag in _groups(role, Part(roles.placement))),
    Flag("colocate_actor_ref", "train.colocate_actor_ref", "ppo", SWITCH, Part(roles.placement)),
    Flag("colocate_critic_reward", "train.colocate_critic_reward", "ppo", SWITCH, Part(roles.placement)),
    Flag("colocate_all_models", "train.colocate_all", "ppo", SWITCH, Part(roles.placement)),
    Flag("vllm_num_engines", "vllm.num_engines", "ppo", WHOLE, Part(roles.placement)),
    Flag("vllm_tensor_parallel_size", "vllm.tensor_parallel_size", "ppo", COUNT, Part(roles.placement), always(1)),
    Flag("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization", "ppo", NUMBER, Part(roles.placement), moved(0.9, ("0.6.4", 0.95))),
    Flag("vllm_enable_sleep", "vllm.enable_sleep", "ppo", SWITCH, Part(roles.placement)),
    Flag("enforce_eager", "vllm.enforce_eager", "ppo", SWITCH, Part(roles.placement)),
    Flag("enable_prefix_caching", "vllm.enable_prefix_caching", "ppo", SWITCH, Same("vLLM's prefix cache is on, and emptied at each weight sync")),
    Flag("vllm_sync_backend", "vllm.sync_backend", "ppo", TEXT, Idle("weights go to the engines in buckets (rollout.sync)"), always("nccl")),
    Flag("vllm_sync_with_ray", "vllm.sync_with_ray", "ppo", SWITCH, Idle("weights go to the engines in buckets (rollout.sync)")),
    Flag("deepspeed_enable_sleep", "ds.enable_sleep", "ppo@0.6.1", SWITCH, Lacking("states of trained roles stay on the cards while engines sample: the plan counts them; actor.zero.optimizer_offload: cpu makes room")),
    Flag("actor_init_on_gpu", "", "ppo@-0.10.1 local", SWITCH, Idle("weights are loaded one by one")),
    Flag("perf", "", "ppo@-0.10.1", SWITCH, Idle("seconds of each phase are in metrics.jsonl")),
    Flag("async_train", "train.async_enable", "ppo@0.8.0", SWITCH, Lacking("a step samples, then learns; nothing is sampled by older weights")),
    Flag("async_queue_size", "train.async_queue_size", "ppo@0.9.1", WHOLE, Idle("a step samples, then learns"), always(1)),
    Flag("partial_rollout", "train.partial_rollout_enable", "ppo@0.9.7", SWITCH, Idle("a step samples, then learns")),
)

_ROLLOUTS = (
    Flag("rollout_batch_size", "rollout.batch_size", _RL, COUNT, Part(batches.batches), each(1024, local=512)),
    Flag("micro_rollout_batch_size", "rollout.micro_batch_size", _RL, WHOLE, _SAME_PACKS, each(moved(8, ("0.10.0", 1)))),
    Flag("n_samples_per_prompt", "rollout.n_samples_per_prompt", _RL, COUNT, Part(batches.batches), always(1)),
    Flag("num_episodes", "train.num_episodes", _RL, COUNT, Part(batches.batches), always(1)),
    Flag("use_dynamic_batch", "train.dynamic_batch_enable", "ppo@0.8.6", SWITCH, Part(batches.micro_batches)),
    Flag("train_max_tokens_per_gpu", "train.max_tokens_per_gpu", "ppo@0.8.6", COUNT, Part(batches.micro_batches), always(16192)),
    Flag("rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu", "ppo@0.8.6", WHOLE, _SAME_PACKS),
    Flag("vllm_generate_batch_size", "rollout.vllm_generate_batch_size", "ppo@0.8.1", COUNT, Part(batches.batches)),
    Flag("prompt_max_len", "", "ppo@-0.9.7 local", COUNT, Part(batches.lengths), always(1024)),
    Flag("generate_max_len", "", "ppo@-0.9.7 local", COUNT, Part(batches.lengths), always(1024)),
    Flag("max_new_tokens", "rollout.max_new_tokens", "ppo@0.9.8", COUNT, Part(batches.lengths)),
    Flag("temperature", "rollout.temperature", _RL, NUMBER, Key(("rollout.sampling.temperature",)), always(1.0)),
    Flag("top_p", "rollout.top_p", _RL, NUMBER, Lacking("the trainer's log-probs are over the whole vocabulary, and so must the sampler's be: top_p is 1 in training", harmless=(1.0,)), always(1.0)),
    Flag("prompt_data", "data.prompt_dataset", _RL, TEXT, Part(rows.rows)),
    Flag("prompt_data_probs", "data.prompt_probs", _RL, TEXT, Part(rows.rows), moved("1.0", ("0.7.0", None))),
    Flag("prompt_split", "data.prompt_split", "ppo@-0.6.4 ppo@0.7.4 local", TEXT, Part(rows.rows), always("train")),
    Flag("pretrain_data", "", "ppo@-0.7.0 local", TEXT, Lacking("nothing is learned beside the prompts' responses (PPO-ptx)", True)),
    Flag("pretrain_data_probs", "", "ppo@-0.7.0 local", TEXT, Idle("it is of pretrain_data"), moved("1.0", ("0.7.0", None))),
    Flag("pretrain_split", "", "ppo@-0.7.0 local", TEXT, Idle("it is of pretrain_data"), always("train")),
    Flag("ptx_coef", "", "ppo@-0.10.1 local", NUMBER, Idle("it is of pretrain_data"), always(0.05)),
    Flag("eval_temperature", "eval.temperature", "ppo@0.7.0", NUMBER, Part(rows.held_out), always(0.6)),
    Flag("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", "ppo@0.7.0", COUNT, Part(rows.held_out), always(4)),
    Flag("best_metric_key", "ckpt.best_metric_key", "ppo@0.9.9", TEXT, Part(rows.held_out), always("")),
    Flag("image_key", "data.image_key", "ppo@0.10.0", TEXT, Idle("rows are text"), always("images")),
    Flag("max_images_per_prompt", "data.max_images_per_prompt", "ppo@0.10.0", WHOLE, Lacking("rows and models are text alone: images cannot be read", True, (0,)), always(0)),
    Flag("freeze_visual_encoder", "actor.freeze_visual_encoder", "ppo@0.10.0", SWITCH, Idle("models are text decoders")),
)

_ALGORITHM = (
    Flag("advantage_estimator", "algo.advantage.estimator", _RL, one_of(*algorithm.ESTIMATORS), Part(algorithm.advantage), always("gae")),
    Flag("gamma", "algo.advantage.gamma", _RL, NUMBER, Part(algorithm.advantage), always(1.0)),
    Flag("lambd", "algo.advantage.lambd", _RL, NUMBER, Part(algorithm.advantage), moved(0.95, ("0.6.4", 1.0))),
    Flag("no_advantage_std_norm", "algo.advantage.no_std_norm", "ppo@0.6.4", SWITCH, Part(algorithm.advantage)),
    Flag("critic_pretrain", "critic.model_name_or_path", _RL, TEXT, Part(algorithm.critic)),
    Flag("value_clip", "critic.value_clip", _RL, NUMBER, Part(algorithm.critic), moved(0.2, ("0.8.2", 0.5))),
    Flag("freezing_actor_steps", "critic.freezing_steps", _RL, WHOLE, Part(algorithm.critic), always(-1)),
    Flag("save_value_network", "critic.save_value_network", _RL, SWITCH, Part(algorithm.critic)),
    Flag("policy_loss_type", "actor.policy_loss_type", "ppo@0.8.8", one_of("ppo", "gspo"), Part(algorithm.policy_loss), always("ppo")),
    Flag("eps_clip", "actor.eps_clip", _RL, NUMBER, Part(algorithm.policy_loss), always(0.2)),
    Flag("eps_clip_low_high", "actor.eps_clip_low_high", "ppo@0.8.2", PAIR, Part(algorithm.policy_loss)),
    Flag("dual_clip", "actor.dual_clip", "ppo@0.8.6", NUMBER, Part(algorithm.policy_loss)),
    Flag("loss_agg_mode", "actor.loss_agg_mode", "ppo@0.11.2", one_of("token-mean", "seq-mean-token-mean"), Part(algorithm.policy_loss), always("token-mean")),
    Flag("entropy_loss_coef", "actor.entropy_coef", "ppo@0.7.2", NUMBER, Key(("algorithm.entropy_bonus",)), moved(0.0, ("0.8.3", None))),
    Flag("enable_vllm_is_correction", "algo.advantage.is_correction_enable", "ppo@0.8.9-0.11.1", SWITCH, Part(algorithm.correction)),
    Flag("use_icepop", "", "ppo@0.9.1-0.9.2", SWITCH, Part(algorithm.correction)),
    Flag("vllm_is_correction_type", "algo.advantage.is_correction_type", "ppo@0.9.3-0.11.1", one_of(*algorithm.CORRECTIONS), Part(algorithm.correction), always("tis")),
    Flag("is_correction_level", "algo.advantage.is_correction_level", "ppo@0.11.2", one_of("off", "token", "seq"), Part(algorithm.correction), always("off")),
    Flag("is_correction_mode", "algo.advantage.is_correction_mode", "ppo@0.11.2", one_of("mask", "clip"), Part(algorithm.correction), always("mask")),
    Flag("is_correction_gating", "algo.advantage.is_correction_gating", "ppo@0.11.2", one_of("ratio", "binary_kl", "tv"), Part(algorithm.correction), always("ratio")),
    Flag("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold", "ppo@0.8.9", BOUNDS, Part(algorithm.correction), moved((2.0,), ("0.9.1", (0.5, 5.0)))),
    Flag("init_kl_coef", "algo.kl.init_coef", _RL, NUMBER, Part(algorithm.kl), always(0.01)),
    Flag("use_kl_loss", "algo.kl.use_loss", _RL, SWITCH, Part(algorithm.kl)),
    Flag("kl_estimator", "algo.kl.estimator", "ppo,local@0.6.1", one_of("k1", "k2", "k3"), Part(algorithm.kl), always("k1")),
    Flag("use_kl_estimator_k3", "", "ppo,local@-0.6.0", SWITCH, Part(algorithm.kl)),
    Flag("kl_target", "algo.kl.target", _RL, NUMBER, Part(algorithm.kl)),
    Flag("kl_horizon", "algo.kl.horizon", "ppo@0.7.1", WHOLE, Part(algorithm.kl), always(10000)),
    Flag("kl_unbiased_gradient", "algo.kl.unbiased_gradient", "ppo@0.11.1", SWITCH, Part(algorithm.kl)),
    Flag("dynamic_filtering", "algo.dynamic_filtering_enable", "ppo@0.8.1", SWITCH, Part(algorithm.dynamic_sampling)),
    Flag("dynamic_filtering_reward_range", "algo.dynamic_filtering_range", "ppo@0.8.1", PAIR, Part(algorithm.dynamic_sampling), always((0.0, 1.0))),
    Flag("enable_ema", "train.enable_ema", _RL, SWITCH, Part(roles.average)),
    Flag("ema_beta", "train.ema_beta", "ppo@0.7.1", NUMBER, Part(roles.average), always(0.992)),
)

_REWARDS = (
    Flag("reward_pretrain", "reward.model_name_or_path", _RL, TEXT, Part(rewards.rewards)),
    Flag("remote_rm_url", "reward.remote_url", _RL, TEXT, Part(rewards.rewards)),
    Flag("agent_func_path", "train.agent_func_path", "ppo@0.8.0", TEXT, Part(rewards.rewards)),
    Flag("normalize_reward", "reward.normalize_enable", _RL, SWITCH, Part(rewards.rewards)),
    Flag("reward_clip_range", "reward.clip_range", _RL, PAIR, Part(rewards.rewards), always((-10.0, 10.0))),
    Flag("overlong_buffer_len", "reward.overlong_buffer_len", "ppo@0.8.7", NUMBER, Part(rewards.rewards)),
    Flag("overlong_penalty_factor", "reward.overlong_penalty_factor", "ppo@0.8.7", NUMBER, Part(rewards.rewards), always(1.0)),
    Flag("stop_properly_penalty_coef", "reward.stop_properly_penalty_coef", "ppo@0.9.2", NUMBER, Part(rewards.rewards)),
    Flag("value_head_prefix", "ds.value_head_prefix", "ppo local rm", TEXT, Part(rewards.heads), always("score")),
    Flag("ref_reward_offload", "", "ppo@-0.10.1", SWITCH, Part(roles.reference)),
    Flag("ref_offload", "ppo:ref.offload dpo:ref.offload", "ppo@0.10.2 dpo kto", SWITCH, Part(roles.reference)),
    Flag(None, "reward.offload", "ppo", SWITCH, Part(rewards.rewards)),
)

_OTHERS = (
    Flag("loss", "model.loss_type", "rm", TEXT, Part(pairs.reward_loss), always("sigmoid")),
    Flag("margin_loss", "model.margin_loss_enable", "rm", SWITCH, Part(rows.rows)),
    Flag("compute_fp32_loss", "model.compute_fp32_loss_enable", "rm", SWITCH, Same("losses are computed in float32")),
    Flag("ref_pretrain", "ref.model_name_or_path", "dpo", TEXT, Part(roles.reference)),
    Flag("beta", "model.beta", "dpo kto", NUMBER, Part(pairs.preference_loss), each(dpo=0.1, kto=0.01)),
    Flag("ipo", "model.ipo_enable", "dpo", SWITCH, Part(pairs.preference_loss)),
    Flag("label_smoothing", "model.label_smoothing", "dpo", NUMBER, Part(pairs.preference_loss), always(0.0)),
    Flag("nll_loss_coef", "model.nll_loss_coef", "dpo", NUMBER, Key(("algorithm.nll_weight",)), always(0.0)),
    Flag("desirable_loss_weight", "", "kto", NUMBER, Part(pairs.preference_loss), always(1.0)),
    Flag("undesirable_loss_weight", "", "kto", NUMBER, Part(pairs.preference_loss), always(1.0)),
    Flag("teacher_model", "", "kd", TEXT, Part(roles.teacher)),
    Flag("teacher_offload", "", "kd", SWITCH, Part(roles.teacher)),
    Flag("kd_coef", "", "kd", NUMBER, Key(("algorithm.nll_share",), lambda share: 1 - share, "what is left of it"), always(0.4)),
    Flag("placeholder_token", "", "prm", TEXT, Idle("steps are texts of a list")),
    Flag("reward_tokens", "", "prm", WORDS, Idle("labels are numbers of a list")),
)

JOBS = (*_PLACES, *_ROLLOUTS, *_ALGORITHM, *_REWARDS, *_OTHERS)
