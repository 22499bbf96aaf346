"""What flags become, with numbers by hand."""

from __future__ import annotations

from collections.abc import Callable

import jinja2
import pytest

from plimsoll.config.yaml_tree import value_at
from plimsoll.convert.openrlhf.rows import as_jinja
from plimsoll.convert.result import Converted
from plimsoll.errors import ConfigError, SettingsConflict

Convert = Callable[..., Converted]


def at(found: Converted, key: str) -> object:
    return value_at(found.values, key.split("."))


def why(found: Converted, kind: str, flag: str) -> str:
    return next(one.why for one in found.remarks if (one.kind, one.about) == (kind, flag))


@pytest.mark.parametrize(
    ("of", "words", "tokens"),
    [
        ("ppo", "--micro_train_batch_size 8 --prompt_max_len 100 --generate_max_len 28", 1024),
        ("ppo", "--use_dynamic_batch --train_max_tokens_per_gpu 5000 --prompt_max_len 1000", 5000),
        ("ppo", "--use_dynamic_batch --train_max_tokens_per_gpu 500 --prompt_max_len 1000", 2024),
        ("sft", "--micro_train_batch_size 2 --max_len 3000", 6000),
        ("rm", "--micro_train_batch_size 2 --max_len 1000", 4000),
        ("dpo", "--max_len 100", 1600),
        ("kto", "", 16384),
    ],
)
def test_micro_batches_of_sequences_become_tokens(
    of: str, words: str, tokens: int, converted: Convert
) -> None:
    assert at(converted(words, of=of), "batch.micro_batch_tokens") == tokens


def test_lengths_of_prompt_and_response(converted: Convert) -> None:
    found = converted("--prompt_max_len 300 --generate_max_len 700", of="ppo")
    assert at(found, "data.max_tokens") == 300
    assert at(found, "rollout.sampling.max_new_tokens") == 700
    found = converted("--max_len 1000 --max_new_tokens 700", "0.10.1", of="ppo")
    assert at(found, "data.max_tokens") == 300
    assert at(found, "rollout.sampling.max_new_tokens") == 700
    found = converted("--max_len 1001", "0.10.1", of="ppo")
    assert at(found, "data.max_tokens") == 500
    assert at(found, "rollout.sampling.max_new_tokens") == 501
    assert "half" in why(found, "check", "rollout.sampling.max_new_tokens")
    with pytest.raises(ConfigError, match="leaves no room for a prompt in --max_len 1000"):
        converted("--max_len 1000 --max_new_tokens 1000", "0.10.1", of="ppo")


def test_batches_of_a_step(converted: Convert) -> None:
    words = "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 32 --max_epochs 2"
    found = converted(f"{words} --num_episodes 3", "0.9.0", of="ppo")
    assert at(found, "batch") == {
        "prompts": 64,
        "responses": 4,
        "micro_batch_tokens": 4 * 2048,
    }
    assert at(found, "algorithm.mini_batches") == 8  # 64 * 4 / 32
    assert (at(found, "algorithm.epochs"), at(found, "run.epochs")) == (2, 3.0)
    with pytest.raises(ConfigError, match=r"--train_batch_size 96 .* 256 .*Nearest: .* 64\."):
        converted(f"{words} --train_batch_size 96", of="ppo")


@pytest.mark.parametrize(
    ("words", "version", "job", "advantage"),
    [
        ("", "0.8.0", "ppo", None),
        ("--advantage_estimator reinforce", "0.8.0", "reinforce_pp", "reinforce_pp"),
        ("--advantage_estimator rloo --n_samples_per_prompt 2", "0.9.0", "rloo", "rloo"),
        # until 0.8.4 it is whitened over the batch
        (
            "--advantage_estimator rloo --n_samples_per_prompt 2",
            "0.8.4",
            "rl",
            "reinforce_pp_baseline",
        ),
        (
            "--advantage_estimator reinforce_baseline --n_samples_per_prompt 2",
            "0.8.0",
            "rl",
            "reinforce_pp_baseline",
        ),
        ("--advantage_estimator group_norm --n_samples_per_prompt 2", "0.8.0", "grpo", "grpo"),
        ("--advantage_estimator dr_grpo --n_samples_per_prompt 2", "0.8.0", "dr_grpo", "dr_grpo"),
        (
            "--advantage_estimator group_norm --policy_loss_type gspo --n_samples_per_prompt 2",
            "0.9.0",
            "gspo",
            "grpo",
        ),
    ],
)
def test_estimators(
    words: str, version: str, job: str, advantage: str | None, converted: Convert
) -> None:
    found = converted(words, version, of="ppo")
    assert found.job == job and at(found, "algorithm.advantage.name") == advantage
    assert ("critic" in found.values) is (job == "ppo")


def test_flash_reinforce_and_dapo(converted: Convert) -> None:
    base = "openrlhf.cli.train_ppo_ray --actor.model a/m --data.prompt_dataset p "
    found = converted(f"{base} --reward.remote http://h/r --algo.advantage.est flash_reinforce")
    assert (found.job, at(found, "algorithm.advantage.name")) == ("rl", "batch_mean")
    words = "--advantage_estimator group_norm --n_samples_per_prompt 8 --dynamic_filtering"
    words += " --eps_clip_low_high 0.2 0.28 --remote_rm_url f.py"
    found = converted(words, "0.9.0", of="ppo")
    assert found.job == "dapo"
    assert at(found, "batch.dynamic_sampling") == {"low": 0.0, "high": 1.0}
    penalised = converted(f"{words} --overlong_buffer_len 100", "0.9.0", of="ppo")
    assert at(penalised, "batch.dynamic_sampling.by") == "reward_func"
    assert at(found, "algorithm.policy_loss.options") == {"clip_low": 0.2, "clip_high": 0.28}
    assert at(found, "algorithm.advantage.options.delta") == 1e-9


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--enable_vllm_is_correction", "0.9.0", {"name": "truncate", "options": {"high": 2.0}}),
        (
            "--enable_vllm_is_correction --use_icepop",
            "0.9.1",
            {"name": "icepop", "options": {"low": 0.5, "high": 5.0}},
        ),
        (
            "--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
            "0.9.4",
            {
                "name": "mask",
                "options": {"level": "geometric", "kept": "token", "low": 0.5, "high": 5.0},
            },
        ),
        ("", "0.9.4", None),
    ],
)
def test_corrections_by_type(
    words: str, version: str, expected: object, converted: Convert
) -> None:
    found = converted(f"--advantage_estimator reinforce {words}", version, of="ppo")
    assert at(found, "algorithm.correction") == expected
    assert "algorithm.correction" in {".".join(entry.key.split(".")[:2]) for entry in found.entries}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("level token mode clip threshold 2", {"name": "truncate", "options": {"high": 2.0}}),
        ("level token", {"name": "icepop", "options": {"low": 0.5, "high": 5.0}}),
        (
            "level seq threshold 0.9 1.1",
            {
                "name": "mask",
                "options": {"level": "geometric", "kept": "token", "low": 0.9, "high": 1.1},
            },
        ),
        ("level seq gating binary_kl threshold 0.1", None),
    ],
)
def test_corrections_by_level(words: str, expected: object, converted: Convert) -> None:
    flags = " ".join(
        f"--algo.advantage.is_correction_{word}"
        if word in ("level", "mode", "gating", "threshold")
        else word
        for word in words.split()
    )
    found = converted(
        "openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p "
        f"--reward.remote_url http://h/r --algo.advantage.estimator reinforce {flags}"
    )
    assert at(found, "algorithm.correction") == expected
    if "gating" in words:
        assert "binary_kl" in why(found, "lacking", "is_correction_gating")


def test_the_kl(converted: Convert) -> None:
    found = converted("--init_kl_coef 0.02 --use_kl_loss --kl_estimator k2", of="ppo")
    assert at(found, "algorithm.kl") == {"place": "loss", "estimator": "k2", "coefficient": 0.02}
    found = converted("--init_kl_coef 0 --use_kl_loss", of="ppo")
    assert at(found, "algorithm.kl") == {"place": "none"} and "reference" not in found.values
    assert "no KL" in why(found, "idle", "use_kl_loss")
    found = converted("--init_kl_coef 0.02 --kl_target 0.1 --kl_horizon 5000", of="ppo")
    assert at(found, "algorithm.kl") == {
        "coefficient": 0.02,
        "target": 0.1,
        "target_per": "token",
        "horizon": 5000,
    }
    assert "coefficient is fixed" in why(
        converted("--kl_horizon 500", of="ppo"), "idle", "kl_horizon"
    )
    with pytest.raises(SettingsConflict, match=r"\(--kl_estimator k1\)"):
        converted("--use_kl_loss --kl_estimator k1", of="ppo")
    words = "--algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.init_coef 0.1"
    base = "openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p "
    found = converted(f"{base} --reward.model_name_or_path r {words}")
    assert at(found, "algorithm.kl") == {
        "place": "loss",
        "coefficient": 0.1,
        "ratio_corrected": True,
    }


def test_the_kl_estimator_of_0_6_0(converted: Convert) -> None:
    """Which is a switch, and nothing then said `--kl_estimator`, whose default is k1."""
    words = "--use_kl_estimator_k3 --use_kl_loss"
    found = converted(words, of="ppo")
    assert found.about.startswith("OpenRLHF 0.6.0,")
    assert at(found, "algorithm.kl") == {"place": "loss", "estimator": "k3"}
    [entry] = [one for one in found.entries if one.key == "algorithm.kl.estimator"]
    assert found.source(entry) == "--use_kl_estimator_k3"


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        (
            ("0.6.0", "--use_kl_estimator_k3"),
            ("0.6.1", "--kl_estimator k3"),
            {"algorithm.kl.estimator": "k3"},
        ),
        (
            ("0.9.1", "--bf16"),
            ("0.9.2", "--param_dtype bf16"),
            {"actor.model.dtype": "bfloat16"},
        ),
        (
            ("0.9.1", "--enable_vllm_is_correction --use_icepop"),
            ("0.9.3", "--enable_vllm_is_correction --vllm_is_correction_type icepop"),
            {"algorithm.correction.name": "icepop"},
        ),
        (
            ("0.9.7", "--prompt_max_len 300 --generate_max_len 700"),
            ("0.9.8", "--max_len 1000 --max_new_tokens 700"),
            {"data.max_tokens": 300, "rollout.sampling.max_new_tokens": 700},
        ),
    ],
)
def test_a_flag_means_what_its_newer_spelling_does(
    older: tuple[str, str], newer: tuple[str, str], expected: dict[str, object], converted: Convert
) -> None:
    for version, words in (older, newer):
        found = converted(words, version, of="ppo")
        assert {key: at(found, key) for key in expected} == expected


def test_groups_of_no_cards_are_none(converted: Convert) -> None:
    none = "_num_nodes 0 --{0}_num_gpus_per_node 0"
    reward, ref, critic = (f"--{one}{none.format(one)}" for one in ("reward", "ref", "critic"))
    found = converted(f"--remote_rm_url http://h/r {reward}", "0.8.0", of="ppo")
    assert why(found, "idle", "reward_num_nodes") == "no reward model is loaded"
    assert at(found, "cluster") == {"ranks": 8, "critic_ranks": 8, "nodes": 2}
    words = f"--advantage_estimator reinforce --init_kl_coef 0 {ref} {critic}"
    found = converted(words, "0.8.0", of="ppo")
    assert why(found, "idle", "ref_num_nodes") == "no reference is loaded"
    assert at(found, "cluster") == {"ranks": 8}
    with pytest.raises(ConfigError, match=r"critic_ranks: 0 .*--critic_num_nodes 0"):
        converted(critic, "0.8.0", of="ppo")
    with pytest.raises(ConfigError, match="It must be 0 or more"):
        converted("--reward_num_nodes -1", "0.8.0", of="ppo")


def test_defaults_that_differ_are_written_and_others_left_out(converted: Convert) -> None:
    found = converted("", "0.6.1", of="ppo")
    assert at(found, "critic.optimizer.learning_rate") == 9e-6
    assert at(found, "actor.optimizer.learning_rate") is None  # 1e-6 in both
    assert at(found, "algorithm.advantage") is None  # gae with lambda 0.95 in both
    assert at(found, "algorithm.value_clip") is None  # 0.2 in both
    assert at(found, "algorithm.aggregation") == "sequences"
    assert at(found, "actor.optimizer") == {
        "schedule": "cosine",
        "warmup_ratio": 0.03,
        "final_ratio": 0.1,
    }
    found = converted("", "0.8.2", of="ppo")
    assert at(found, "algorithm.advantage.options.gae_lambda") == 1.0
    assert at(found, "algorithm.value_clip") == 0.5
    assert at(found, "algorithm.aggregation") is None  # tokens in both
    assert at(found, "algorithm.correction") is None  # none in both, of the preset ppo


def test_critic_warm_up_counts_from_one_until_0_9_0(converted: Convert) -> None:
    key, words = "algorithm.critic_warmup_steps", "--freezing_actor_steps 5"
    assert at(converted(words, "0.9.0", of="ppo"), key) == 5
    assert at(converted(words, "0.9.1", of="ppo"), key) == 6


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr_scheduler linear", {"schedule": "linear", "warmup_ratio": 0.03}),
        ("--lr_scheduler constant", {}),
        ("--lr_scheduler constant_with_warmup", {"warmup_ratio": 0.03}),
        (
            "--lr_warmup_ratio 0.1 --min_lr_ratio 0.2",
            {"schedule": "cosine", "warmup_ratio": 0.1, "final_ratio": 0.2},
        ),
    ],
)
def test_schedules(words: str, expected: dict[str, object], converted: Convert) -> None:
    optimizer = at(converted(f"{words} --learning_rate 1e-5", "0.9.0", of="dpo"), "actor.optimizer")
    assert isinstance(optimizer, dict)
    optimizer.pop("learning_rate")
    given = {k: v for k, v in optimizer.items() if (k, v) != ("schedule", "constant")}
    assert given == expected


def test_unknown_schedules_and_optimizers_are_refused(converted: Convert) -> None:
    with pytest.raises(ConfigError, match="--lr_scheduler polynomial: there is no such schedule"):
        converted("--lr_scheduler polynomial", of="sft")
    base = (
        "openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d --data.output_key o"
    )
    with pytest.raises(ConfigError, match=r"--optim: muon\n      Not supported: .* AdamW"):
        converted(f"{base} --optim muon")


def test_where_roles_live(converted: Convert) -> None:
    groups = "--actor_num_nodes 2 --actor_num_gpus_per_node 8 --critic_num_nodes 1 "
    engines = "--vllm_num_engines 8 --vllm_tensor_parallel_size 2 --vllm_enable_sleep "
    found = converted(groups + engines, "0.8.0", of="ppo")
    # 16 of the actor's, 8 of the critic's, 16 of the engines': 5 machines of 8
    assert at(found, "cluster") == {"ranks": 16, "critic_ranks": 8, "nodes": 5}
    assert "HOST:PORT" in why(found, "check", "cluster.address")
    assert at(found, "rollout.placement") is None  # cards of their own
    found = converted(groups + engines + "--colocate_all_models", "0.8.0", of="ppo")
    assert at(found, "cluster") == {"ranks": 16, "nodes": 2}
    assert at(found, "rollout.placement") == "shared" and at(found, "rollout.sleep_level") == 2
    found = converted(groups + engines + "--colocate_all_models --async_train", "0.8.0", of="ppo")
    assert at(found, "cluster") == {"ranks": 16, "nodes": 4}
    assert "samples, then learns" in why(found, "lacking", "async_train")
    found = converted("", of="local")
    assert at(found, "rollout") == {
        "engine": "transformers",
        "placement": "shared",
        "sampling": {"max_new_tokens": 1024},
    }


def test_ranks_of_the_launcher(converted: Convert) -> None:
    words = "openrlhf.cli.train_rm --pretrain m --dataset d"
    found = converted(f"torchrun --nproc_per_node 4 --nnodes 2 -m {words}")
    assert at(found, "cluster") == {"ranks": 8, "nodes": 2}
    found = converted(f"deepspeed --module {words}")
    assert at(found, "cluster") == {"ranks": 8}
    assert "no flag says how many cards" in why(found, "check", "cluster.ranks")


def test_references_and_offloads(converted: Convert) -> None:
    found = converted("--zero_stage 3 --ref_offload --adam_offload --zpg 8", of="dpo")
    assert at(found, "reference") == {"model": {"path": "a/m"}, "stage": 3, "offload": "cpu"}
    assert at(found, "actor.zero") == {
        "stage": 3,
        "optimizer_offload": "cpu",
        "hpz_partition_size": 8,
        "gradient_dtype": "bfloat16",
    }
    assert "reference" not in converted("", of="dpo").values
    found = converted(
        "--lora_rank 8 --lora_alpha 16 --zero_stage 3 --target_modules q_proj", of="dpo"
    )
    assert "reference" not in found.values  # the actor without its adapter
    assert at(found, "actor.adapter") == {"rank": 8, "alpha": 16.0, "targets": ("q_proj",)}


def test_rewards(converted: Convert) -> None:
    words = "--remote_rm_url http://h:5/a,http://i/b --advantage_estimator reinforce"
    found = converted(words, "0.8.0", of="ppo")
    assert at(found, "rewards.remote") == {
        "http": {
            "urls": ("http://h:5/a", "http://i/b"),
            "format": "openrlhf",
            "tokenizer": "a/m",
            "time_limit": 180.0,
        },
        "clip": (-10.0, 10.0),
    }
    found = converted(words, "0.6.1", of="ppo")  # added up then
    rewards = at(found, "rewards")
    assert isinstance(rewards, dict) and [*rewards] == ["remote_1", "remote_2"]
    words = "--remote_rm_url /x/f.py --stop_properly_penalty_coef -0.5 --overlong_buffer_len 100"
    words += " --max_new_tokens 1000 --advantage_estimator group_norm --n_samples_per_prompt 2"
    found = converted(words, "0.10.0", of="ppo")
    assert at(found, "rewards") == {
        "reward_func": {
            "name": "openrlhf_function",
            "options": {"path": "/x/f.py", "tokenizer": "a/m"},
            "truncated_factor": 0.0,
        },
        "overlong": {
            "name": "overlong",
            "options": {"max_new_tokens": 1000, "buffer": 100, "factor": 1.0},
            "truncated_factor": 0.0,
        },
        "length": {"name": "length", "options": {"value": -0.5}},
    }
    with pytest.raises(
        ConfigError, match=r"Nothing scores the responses\. Give one of --reward_pre"
    ):
        converted("openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p", "0.8.0")


def test_agents_are_environments(converted: Convert) -> None:
    words = "--agent_func_path agent.py --prompt_max_len 100 --generate_max_len 300"
    found = converted(f"{words} --advantage_estimator reinforce", "0.8.0", of="ppo")
    assert at(found, "environments.agent") == {
        "name": "agent.py",
        "max_turns": 150,
        "max_tokens": 300,
        "tool_format": "none",
    }
    assert "rewards" not in found.values and "reward_model" not in found.values
    words = "--agent_func_path agent.py --max_new_tokens 300 --overlong_buffer_len 50"
    words += " --advantage_estimator reinforce"
    found = converted(words, "0.10.0", of="ppo")
    options = {"max_new_tokens": 300, "buffer": 50, "factor": 1.0, "observations": True}
    assert at(found, "rewards.overlong.options") == options


@pytest.mark.parametrize(
    ("of", "words", "columns"),
    [
        ("ppo", "--input_key q", {"prompt": "q"}),
        ("ppo", "--input_key q --label_key a", {"prompt": "q", "reference": "a"}),
        (
            "ppo",
            "--input_key context_messages --apply_chat_template",
            {"messages": "context_messages"},
        ),
        ("sft", "--input_key q", {"prompt": "q", "response": "out"}),
        ("sft", "--input_key t --pretrain_mode", {"text": "t"}),
        ("rm", "--margin_loss", {"chosen": "chosen", "rejected": "rejected", "margin": "margin"}),
        ("dpo", "--prompt_key p", {"prompt": "p", "chosen": "chosen", "rejected": "rejected"}),
        ("kto", "--input_key q", {"prompt": "q", "response": "out", "label": "label"}),
    ],
)
def test_columns(of: str, words: str, columns: dict[str, str], converted: Convert) -> None:
    train = at(converted(words, "0.9.0", of=of), "data.train")
    assert isinstance(train, dict)
    assert {k: v for k, v in train.items() if k not in ("path", "limit")} == columns


def test_sources(converted: Convert) -> None:
    words = "openrlhf.cli.train_sft --pretrain m --output_key o --dataset ./a@b,org/c@d,e.jsonl"
    found = converted(f"{words} --dataset_probs 0.5,0.3,0.2 --max_samples 100")
    train = at(found, "data.train")
    shared = {"prompt": "input", "response": "o", "limit": 100}
    assert train == {
        "b": {"path": "./a/b", **shared, "weight": 0.5},
        "c": {"path": "org/c", "name": "d", **shared, "weight": 0.3},
        "e": {"path": "e.jsonl", **shared, "weight": 0.2},
    }
    assert "concatenated there" in why(converted(words), "check", "data.train")
    with pytest.raises(ConfigError, match="has 2 numbers for 3 sources"):
        converted(f"{words} --dataset_probs 0.5,0.5")


def test_templates(converted: Convert) -> None:
    assert at(converted("", of="rm"), "data.chat_template") == "none"
    assert at(converted("--apply_chat_template", of="rm"), "data.chat_template") is None
    words = "--apply_chat_template --tokenizer_chat_template '{{ messages }}'"
    assert at(converted(words, of="rm"), "data.chat_template") == "{{ messages }}"
    default = at(converted("", of="sft"), "data.chat_template")
    assert default == as_jinja("User: {}\nAssistant: ")
    assert at(converted("--input_template Q", of="sft"), "data.chat_template") == "none"


@pytest.mark.parametrize("text", ["User: {}\nAssistant: ", '"q" {} \\ é', "{}", "{{% x %}}{}{{"])
def test_an_input_template_as_jinja_writes_what_format_does(text: str) -> None:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    template = jinja2.Environment().from_string(as_jinja(text))
    prompt = text.format("2+2?")
    assert template.render(messages=turns[:1], eos_token="</s>") == prompt
    assert template.render(messages=turns, eos_token="</s>") == f"{prompt}4</s>"


def test_held_out_rows(converted: Convert) -> None:
    words = "--eval_dataset e.jsonl --eval_steps 5 --eval_temperature 0.7 --top_p 0.9"
    found = converted(f"--remote_rm_url f.py {words} --label_key a", "0.9.9", of="ppo")
    assert at(found, "data.eval") == {
        "path": "e.jsonl",
        "prompt": "input",
        "reference": "a",
        "responses": 4,
    }
    assert at(found, "eval_sampling") == {
        "max_new_tokens": 1024,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    assert at(found, "run.eval_every") == 5
    assert at(found, "run.best.metric") == "eval/reward"
    assert "top_p is 1 in training" in why(found, "lacking", "top_p")
    found = converted("--eval_dataset e.jsonl --max_samples 1000 --train_batch_size 100", of="dpo")
    assert at(found, "run.eval_every") == 10  # once an epoch
    assert at(found, "data.eval.split") == "test"


def test_losses_of_pairs_labels_and_teachers(converted: Convert) -> None:
    found = converted("--ipo --beta 0.2 --nll_loss_coef 0.1", of="dpo")
    assert at(found, "algorithm") == {
        "loss": {"name": "ipo", "options": {"beta": 0.2}},
        "nll_weight": 0.1,
    }
    found = converted("--label_smoothing 0.1", of="dpo")
    assert at(found, "algorithm.loss.options") == {"label_smoothing": 0.1}
    assert at(converted("--loss logexp", of="rm"), "algorithm.loss.name") == "log_exp"
    found = converted("--desirable_loss_weight 2", of="kto")
    assert at(found, "algorithm.loss.options") == {"beta": 0.01, "desirable_weight": 2.0}
    found = converted("--kd_coef 0.7 --teacher_offload --zero_stage 3", of="kd")
    assert found.job == "distill" and at(found, "algorithm.nll_share") == pytest.approx(0.3)
    assert at(found, "teacher") == {"model": {"path": "a/t"}, "stage": 3, "offload": "cpu"}


def test_what_is_not_supported_is_refused_with_its_reason(converted: Convert) -> None:
    with pytest.raises(ConfigError, match="`plimsoll prm` reads lists"):
        converted("openrlhf.cli.train_prm --pretrain m --dataset d")
    with pytest.raises(ConfigError, match=r"trains nothing\. `plimsoll serve-reward CONFIG`"):
        converted("openrlhf.cli.serve_rm --reward_pretrain m")
    with pytest.raises(ConfigError, match="images cannot be read"):
        converted(
            "openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p "
            "--reward.remote_url f.py --data.max_images_per_prompt 1"
        )


def test_the_version_is_told_from_the_flags(converted: Convert) -> None:
    found = converted("--flash_attn --agent_func_path a.py", of="ppo")  # 0.8.0 to 0.8.9
    assert found.about == "OpenRLHF 0.8.9, train_ppo_ray"
    assert found.told.startswith("The flags are those of 0.8.0 to 0.8.9. --version 0.8.0 would")
    assert "algorithm.value_clip: 0.2" in found.told
    found = converted("--flash_attn --agent_func_path a.py", "0.8.0", of="ppo")
    assert found.about == "OpenRLHF 0.8.0, train_ppo_ray" and found.told == ""


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        ("--vllm_enable_is_correction", None, "did you mean --enable_vllm_is_correction"),
        ("--learning_rat 1 --learning_rates 2", None, "did you mean"),
        ("--beta 0.1", None, r"train_ppo_ray of OpenRLHF .* has it; train_dpo and train_kto has"),
        ("--flash_attn", "0.9.0", r"has it from 0\.6\.0 to 0\.8\.9, and this is 0\.9\.0"),
        ("--flash_attn --param_dtype bf16", None, "and the other flags are those of"),
        ("--actor_num 3", None, "It may be --actor_num_gpus_per_node or --actor_num_nodes"),
        ("--zero_stage three", None, r"--zero_stage: three\n      It must be a whole number"),
        ("--zero_stage", None, "It takes a value, and none follows"),
        ("--packing_samples 3", None, "--packing_samples takes no more words"),
        ("--kl_estimator k4", None, "It must be one of k1, k2, k3"),
        ("--gamma nan", None, "It must be a finite number"),
        ("--train_batch_size 0", None, "It must be 1 or more"),
        ("--adam_betas 0.9", None, "It takes 2 values, and 1 follows"),
    ],
)
def test_wrong_flags_are_named_with_what_is_near(
    words: str, version: str | None, message: str, converted: Convert
) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(words, version, of="ppo")


def test_beginnings_and_equal_signs_are_read_as_argparse_does(converted: Convert) -> None:
    found = converted("--prompt_max=64 --generate_m 32 --init_kl=0.5 --eval_steps -1", of="ppo")
    assert at(found, "data.max_tokens") == 64
    assert at(found, "rollout.sampling.max_new_tokens") == 32
    assert at(found, "algorithm.kl.coefficient") == 0.5


def test_a_key_of_a_service_is_never_shown(converted: Convert) -> None:
    found = converted("--use_wandb SECRET --wandb_project p", of="sft")
    assert at(found, "run.loggers") == ("wandb",) and at(found, "run.logger_project") == "p"
    assert "SECRET" not in f"{found.shown}{found.entries}{found.remarks}"
