"""`variant: paper`: each preset with the values of its paper, which were copied out by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.config.choice import check_choice
from plimsoll.config.load import render_preset
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec, read_spec
from plimsoll.rl.presets import PRESETS

MINIMAL: dict[str, Any] = {
    "run": {"directory": "out", "steps": 3},
    "data": {"train": {"path": "rows.jsonl", "prompt": "question"}},
    "actor": {"model": {"path": "model"}},
    "rewards": {"right": {"name": "math_answer"}},
    "batch": {"micro_batch_tokens": 32_000},
    "rollout": {"vllm": {"max_sequences": 64}, "sampling": {"max_new_tokens": 20480}},
}

# Of each paper: the key, its value there, and where the paper says so.
PAPERS: dict[str, dict[str, tuple[object, str]]] = {
    "grpo": {  # DeepSeekMath, arXiv 2402.03300
        "batch.responses": (64, "4.2: 'For each question, we sample 64 outputs'"),
        "algorithm.advantage.name": ("grpo", "4.1.2: (r - mean) / std"),
        "algorithm.policy_loss.name": ("clip", "equation 3"),
        "algorithm.aggregation": ("sequences", "equation 3: 1/G sum 1/|o_i| sum"),
        "algorithm.kl.place": ("loss", "equation 3: - beta D_KL"),
        "algorithm.kl.estimator": ("k3", "equation 4"),
        "algorithm.kl.coefficient": (0.04, "4.2: 'The KL coefficient is 0.04'"),
        "algorithm.mini_batches": (1, "4.2: 'only has a single update'"),
        "algorithm.epochs": (1, "the same"),
        "algorithm.correction": (None, "none"),
    },
    "dr_grpo": {  # arXiv 2503.20783
        "batch.responses": (8, "table 6"),
        "algorithm.advantage.name": ("dr_grpo", "3.2: without the standard deviation"),
        "algorithm.policy_loss.name": ("clip", "table 6: 0.2, which is the loss's default"),
        "algorithm.aggregation": ("constant", "3.2: over the generation budget"),
        "algorithm.aggregation_tokens": (None, "the budget, rollout.sampling.max_new_tokens"),
        "algorithm.kl": (None, "'we will assume beta = 0'"),
        "algorithm.correction": (None, "none"),
    },
    "rloo": {  # arXiv 2402.14740
        "batch.responses": (4, "k of 2 and 4"),
        "algorithm.advantage.name": ("rloo", "2.3"),
        "algorithm.advantage.options": ({"whole": True}, "R(x, y) = r - beta log pi/ref"),
        "algorithm.policy_loss.name": ("reinforce", "3.2: no clip"),
        "algorithm.aggregation": ("constant", "3.3: a response is one action, log pi(y|x)"),
        "algorithm.aggregation_tokens": (1, "the sum over its tokens"),
        "algorithm.kl.place": ("reward", "R(x, y)"),
        "algorithm.kl.estimator": ("k1", "log pi/ref"),
        "algorithm.kl.coefficient": (0.03, "appendix C, TL;DR"),
        "algorithm.mini_batches": (1, "REINFORCE: on-policy"),
        "algorithm.correction": (None, "none"),
    },
    "gspo": {  # arXiv 2507.18071
        "algorithm.advantage.name": ("grpo", "equation 6"),
        "algorithm.policy_loss.name": ("gspo", "equation 5; 3e-4 and 4e-4 are its defaults"),
        "algorithm.aggregation": ("sequences", "equation 5"),
        "algorithm.kl": (None, "'we omit the KL regularization term'"),
        "algorithm.mini_batches": (4, "5.1: 'partitioned into four mini-batches'"),
        "algorithm.correction": (None, "none"),
    },
    "cispo": {  # MiniMax-M1, arXiv 2506.13585
        "algorithm.advantage.name": ("grpo", "3.1"),
        "algorithm.policy_loss.name": ("cispo", "equation 4"),
        "algorithm.policy_loss.options": (
            {"clip_low": 1.0, "clip_high": 0.2},
            "3.1: 'we did not impose a lower bound on the IS weight'; the upper one is not given",
        ),
        "algorithm.aggregation": ("tokens", "equation 4"),
        "algorithm.kl": (None, "'There is no KL penalty term'"),
        "algorithm.mini_batches": (16, "'16 rounds of off-policy updates'"),
        "batch.dynamic_sampling.by": ("right", "'the dynamic sampling ... from Yu et al.'"),
        "rewards.overlong.name": ("overlong", "'... and length penalty techniques'"),
        "algorithm.correction": (None, "none"),
    },
    "dapo": {  # arXiv 2503.14476
        "batch.responses": (16, "4.1: 'we sample 16 responses for each prompt'"),
        "algorithm.advantage.name": ("grpo", "equation 9"),
        "algorithm.policy_loss.name": ("clip", "equation 8"),
        "algorithm.policy_loss.options": ({"clip_low": 0.2, "clip_high": 0.28}, "4.1"),
        "algorithm.aggregation": ("tokens", "equation 12"),
        "algorithm.kl": (None, "2.3: 'we will exclude the KL term'"),
        "algorithm.mini_batches": (16, "4.1: '16 gradient updates for each rollout step'"),
        "batch.dynamic_sampling.by": ("right", "equation 11: 0 < |{is_equivalent}| < G"),
        "rewards.overlong.name": ("overlong", "equation 13"),
        "rewards.overlong.weight": (1.0, "equation 13: added to the reward"),
        "rewards.overlong.options": (
            {"max_new_tokens": 20480, "buffer": 4096},
            "4.1: 16,384 tokens, and 4,096 more as the soft punish cache; a factor of 1",
        ),
        "algorithm.correction": (None, "none"),
    },
}
LINES = [(name, key, *line) for name, lines in PAPERS.items() for key, line in lines.items()]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(command: str, *flags: str, **more: Any) -> RlConfig:
    Path("c.yaml").write_text(yaml.safe_dump({**MINIMAL, **more}, sort_keys=False))
    config: RlConfig = load_spec(JOBS[command], "c.yaml", list(flags)).config
    return config


def at(config: RlConfig, key: str) -> object:
    value: Any = config.model_dump()
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize(("name", "key", "value", "source"), LINES)
def test_one_line_gives_the_values_of_the_paper(
    name: str, key: str, value: object, source: str
) -> None:
    assert at(config_of(name, variant="paper"), key) == value, source


def test_each_preset_with_a_paper_is_in_the_table_and_its_functions_take_its_options() -> None:
    assert {p.name for p in PRESETS.values() if p.paper is not None} == PAPERS.keys()
    for name in PAPERS:
        for package, choice in JOBS[name].choices(config_of(name, variant="paper")).items():
            check_choice(choice, f"plimsoll.algorithm.{package}")


@pytest.mark.parametrize("name", PAPERS)
def test_a_variant_is_a_flag_and_a_resolved_config_reads_back_the_same(name: str) -> None:
    config = config_of(name, variant="paper")
    assert config_of(name, "--variant", "paper") == config
    assert config_of("rl", "--variant=paper", preset=name) == config
    Path("again.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_spec(JOBS["rl"], "again.yaml").config == config


def test_a_config_has_the_last_word_over_a_paper() -> None:
    algorithm = {"kl": {"coefficient": 0.1}, "correction": {"name": "icepop"}}
    config = config_of("grpo", variant="paper", algorithm=algorithm)
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.place, config.algorithm.kl.coefficient) == ("loss", 0.1)
    assert config.algorithm.correction is not None and config.algorithm.correction.name == "icepop"
    sequence = config_of("rloo", "--algorithm.policy_loss.name=clip", variant="paper")
    assert sequence.algorithm.policy_loss.name == "clip"
    assert sequence.algorithm.policy_loss.options == {}


def test_the_penalty_of_length_follows_the_longest_response() -> None:
    """A fifth of it, as 4,096 are of 20,480: at a length of its own the penalty would never be."""
    config = config_of("dapo", "--rollout.sampling.max_new_tokens=1000", variant="paper")
    options = config.rewards["overlong"].options
    assert options == {"max_new_tokens": 1000, "buffer": 200}
    default = config_of("dapo", variant="paper", rollout={}).rewards["overlong"].options
    assert default == {"max_new_tokens": 512, "buffer": 102}
    config = config_of("dapo", "--rewards.overlong.options.buffer=7", variant="paper")
    assert config.rewards["overlong"].options == {"max_new_tokens": 20480, "buffer": 7}


def test_groups_are_looked_at_by_the_part_that_weighs_most_and_not_by_the_penalty() -> None:
    several = {
        "form": {"name": "format", "weight": 0.1},
        "right": {"name": "math_answer", "weight": 2},
        "neat": {"name": "length", "weight": 2},
        "overlong": {"options": {"factor": 9.0}, "weight": 5},
    }
    config = config_of("dapo", variant="paper", rewards=several)
    assert config.batch.dynamic_sampling is not None
    assert config.batch.dynamic_sampling.by == "right"
    assert list(config.rewards) == ["form", "right", "neat", "overlong"]
    chosen = MINIMAL["batch"] | {"dynamic_sampling": {"by": "neat", "oversampling": 2.0}}
    config = config_of("dapo", variant="paper", rewards=several, batch=chosen)
    assert config.batch.dynamic_sampling is not None
    assert config.batch.dynamic_sampling.by == "neat"
    # Of equal weights the config's own comes first, also for pass@k.
    assert list(config_of("dapo", variant="paper").rewards) == ["right", "overlong"]


def test_without_a_reward_of_its_own_a_config_is_looked_at_by_its_environment() -> None:
    played = {"game": {"name": "my_games:Game", "max_tokens": 20480}}
    config = config_of("dapo", variant="paper", rewards={}, environments=played)
    assert config.batch.dynamic_sampling is not None
    assert config.batch.dynamic_sampling.by == "environment"
    model = {"role": {"model": {"path": "m"}}}
    config = config_of("dapo", variant="paper", rewards={}, reward_model=model)
    assert config.batch.dynamic_sampling is not None and config.batch.dynamic_sampling.by is None


def test_a_part_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)dynamic_sampling\.by: rigth.*did you mean right\?"):
        config_of("dapo", "--batch.dynamic_sampling.by=rigth")
    with pytest.raises(ConfigError, match=r"dynamic_sampling\.by: zzz(?s:.*)one of right"):
        config_of("dapo", "--batch.dynamic_sampling.by=zzz")


def test_a_variant_needs_a_preset_with_a_paper() -> None:
    with pytest.raises(ConfigError, match=r"variant: paper.* none.*: grpo, dr_grpo"):
        config_of("rl", variant="paper")
    with pytest.raises(ConfigError, match=r"reinforce_pp .* paper.*: grpo, dr_grpo"):
        config_of("reinforce_pp", variant="paper")
    Path("mine.yaml").write_text("batch: {responses: 2}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml .* paper.*: grpo, dr_grpo"):
        config_of("rl", preset="mine.yaml", variant="paper")
    Path("mine.yaml").write_text("variant: paper\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*\bvariant\b"):
        config_of("rl", preset="mine.yaml")
    with pytest.raises(ConfigError, match=r"'dpao'.* dapo\?"):
        config_of("rl", preset="dpao", variant="paper")
    with pytest.raises(ConfigError, match=r"variant: papr"):
        config_of("dapo", variant="papr")


def test_the_origin_of_a_value_names_the_variant_and_a_dry_run_shows_it() -> None:
    Path("c.yaml").write_text(yaml.safe_dump({**MINIMAL, "variant": "paper"}))
    spec, origins = read_spec(JOBS["grpo"], "c.yaml", ["--batch.responses=8"])
    assert origins["algorithm", "aggregation"] == "preset grpo, variant paper"
    text = render_preset("grpo", PRESETS, spec.config.model_dump())
    assert text.startswith("Preset grpo, variant paper\n")
    assert re.search(r"batch\.responses +64 +\(overridden: 8\)", text)
    Path("c.yaml").write_text(yaml.safe_dump(MINIMAL))
    spec, _ = read_spec(JOBS["grpo"], "c.yaml", [])
    today = render_preset("grpo", PRESETS, spec.config.model_dump())
    assert re.search(r"algorithm\.kl +none$", today, re.MULTILINE)  # and not overridden by null
