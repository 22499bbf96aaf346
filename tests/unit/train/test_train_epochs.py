"""`run.epochs`: the length of a run, given by its rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.placement import placement
from plimsoll.data.dataset import load_samples
from plimsoll.errors import ConfigError
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.run_data import load_data
from plimsoll.train.session import RunSession, open_session

SUMS = [{"q": f"{a}+1=", "a": f" {a + 1}"} for a in range(7)]


def spec(**settings: Any) -> RunSpec[SftConfig]:
    """Return a run with 3 rows a step."""
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    run = {"directory": "run", "tensorboard": False, **settings.pop("run")}
    config = {
        "run": run,
        "cluster": {"where": "local"},
        "data": {"train": sums, "max_tokens": 8, "chat_template": "none"},
        "actor": {"model": {"path": "model"}, **settings},
        "batch": {"sequences": 3},
    }
    return spec_of(SftConfig.model_validate(config))


def read(model_home: Path, run: RunSpec[SftConfig]) -> RunSession:
    (model_home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    with open_session(run, Planned()) as session:
        return session.with_rows(len(load_data(session, load_samples).train))


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (3.0, 7), (0.5, 2)])
def test_epochs_are_steps_once_the_rows_are_read(
    model_home: Path, epochs: float, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 rows, 3 a step: if rows are left over, the last step goes into the next epoch."""
    run = spec(run={"epochs": epochs})
    check_agreement(run)
    assert run.known_steps is None
    session = read(model_home, run)
    assert session.spec.steps == steps
    assert session.is_due(5, steps) and not session.is_due(5, 1)
    assert f"run.epochs: {epochs:g} of 7 rows: {steps} steps" in capsys.readouterr().out


def test_a_warm_up_longer_than_the_steps_is_refused_before_anything_is_loaded(
    model_home: Path,
) -> None:
    run = spec(run={"epochs": 1}, optimizer={"warmup_steps": 4})
    check_agreement(run)  # the number of steps is not known yet
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.warmup_steps: 4\b(?s:.*) 3 "):
        read(model_home, run)


def test_the_length_of_a_run_is_given_one_way() -> None:
    with pytest.raises(ConfigError, match=r"run\.steps: 3\n.*run\.epochs\b"):
        check_agreement(spec(run={"steps": 3, "epochs": 2}))
    with pytest.raises(ConfigError, match=r"run\.steps\n.*Missing"):
        check_agreement(spec(run={}))


def test_a_dry_run_says_that_the_steps_are_not_known_yet() -> None:
    text = placement(spec(run={"epochs": 2}))
    assert re.search(r"run\.epochs: 2; .*steps", text)
