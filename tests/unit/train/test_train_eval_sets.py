"""GSM8K and MATH-500 as sets of a config: read as published, with references that a rule takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.preflight import check_inputs
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import spec_of
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.reward.score import open_rewards
from plimsoll.rl.setup import RlData, load_prompt_data
from plimsoll.run.readings import Planned
from plimsoll.train.session import open_session

DATA = Path(os.environ.get("PLIMSOLL_DATA", Path(__file__).parents[4] / "shared" / "data"))

pytestmark = pytest.mark.skipif(
    not all((DATA / name).is_dir() for name in ("gsm8k", "math500")),
    reason="GSM8K and MATH-500 are not here: set PLIMSOLL_DATA to the directory that holds "
    "gsm8k/ and math500/",
)


def config(**sets: dict[str, Any]) -> RlConfig:
    """Return a run that learns from GSM8K and evaluates on both sets, on MATH-500 by votes."""
    grade: dict[str, Any] = {
        "path": str(DATA / "gsm8k"),
        "prompt": "question",
        "reference": "answer",
        "limit": 20,
    }
    math: dict[str, Any] = {
        "path": str(DATA / "math500"),
        "messages": "prompt",
        "reference": "final_answer",
    }
    math |= {"responses": 8, "sampling": {"temperature": 0.6}, "limit": 20}
    held_out = {"grade": {**grade, "split": "test"}, "math": math}
    changed = {name: keys | sets.get(name, {}) for name, keys in held_out.items()}
    best = {"metric": "eval/math/maj@8", "goal": "highest"}
    return RlConfig.model_validate(
        {
            "run": {"directory": "run", "steps": 1, "eval_every": 1, "best": best},
            "cluster": {"where": "local"},
            "data": {"train": grade, "eval": changed, "chat_template": "none", "max_tokens": 3072},
            "batch": {"prompts": 4, "responses": 1},
            "actor": {"model": {"path": "model"}},
            "rewards": {"right": {"name": "math_answer"}},
            "rollout": {"transformers": {}},
            "algorithm": {"advantage": {"name": "reinforce"}},
        }
    )


def loaded(config: RlConfig) -> RlData:
    spec = spec_of(config)
    check_agreement(spec)
    with open_rewards(config.rewards) as scorer, open_session(spec, Planned()) as session:
        return load_prompt_data(session, spec, scorer.references)


@pytest.mark.usefixtures("model_home")
def test_they_load_by_config_alone() -> None:
    data = loaded(config())
    assert {key: len(rows) for key, rows in data.held_out.items()} == {
        "data.eval.grade": 20,
        "data.eval.math": 20,
    }
    grade, math = (rows[0] for rows in data.held_out.values())
    assert (grade.source, math.source) == ("grade", "math")
    assert grade.reference is not None and grade.reference.endswith("#### 18")
    assert math.reference == r"\left( 3, \frac{\pi}{2} \right)"
    assert math.text.startswith("Convert the point $(0,3)$")


@pytest.mark.usefixtures("model_home")
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"math": {"reference": "answer"}}, r"math\.reference: answer\n.*there are `prompt`, `fin"),
        ({"grade": {"reference": "anwser"}}, r"grade\.reference: anwser\n.*\n.*mean 'answer'\?"),
        ({"math": {"reference": None}}, r"math\.reference\n.*rewards\.right would compare"),
    ],
)
def test_a_wrong_column_of_answers_is_named_before_anything_is_loaded(
    sets: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.eval\.{message}"):
        check_inputs(spec_of(config(**sets)))
