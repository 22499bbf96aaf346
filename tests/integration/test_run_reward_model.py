"""A reward model as a part of the reward in PPO: its scores are those of transformers."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from commands import (
    PPO,
    Command,
    assert_reported,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)
from test_ledger_runs import check_sane
from test_run_nodes import noted_nodes
from transformers import AutoModelForSequenceClassification

from plimsoll.config.reward import HttpReward, RewardConfig
from plimsoll.errors import PlimsollError
from plimsoll.model.load import load_tokenizer
from plimsoll.model.policy import initialise_score
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.score import open_rewards
from plimsoll.run.ledger import read_ledger


def scored_ppo(directory: str, **role: Any) -> dict[str, Any]:
    config = copy.deepcopy(PPO)
    config["run"] |= {"directory": directory, "steps": 1, "eval_every": 1, "save_every": None}
    config["reward_model"] = {"role": {"model": {"path": "judge"}} | role, "weight": 3.0}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a reward model, `judge`, whose scores are far from 0."""
    home = tmp_path_factory.mktemp("judged")
    write_task(home)
    judge = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
    initialise_score(judge.score, seed=1)
    with torch.no_grad():
        judge.score.weight.mul_(100)
    judge.save_pretrained(home / "judge")
    return home


def test_the_score_is_that_of_transformers_at_the_last_token(home: Path) -> None:
    write_config(home, "judged", scored_ppo("judged", zero={"stage": 3}))
    outcome = run_here(home, "ppo", "judged.yaml")
    assert outcome.code == 0, outcome.err
    table = parquet.read_table(home / "judged" / "trajectories" / "step-000001.parquet").to_pylist()
    judge = AutoModelForSequenceClassification.from_pretrained(
        home / "judge", num_labels=1, dtype=torch.bfloat16
    ).float()  # the run's weights, without its rounding
    tokenizer = load_tokenizer(str(home / "model"))
    scores = []
    for row in table:
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        tokens = torch.tensor([[*prompt, *row["tokens"]]])
        with torch.no_grad():
            hidden = judge.model(tokens).last_hidden_state[0, -1]
            scores.append(float(hidden.float() @ judge.score.weight[0].float()))
        assert row["reward_reward_model"] == pytest.approx(scores[-1], abs=0.2)
    assert max(scores) - min(scores) > 0.5
    first, last = metrics(home / "judged")
    assert last["reward/reward_model"] == pytest.approx(sum(scores) / len(scores), abs=0.05)
    parts = last["reward/answer"] + 0.1 * last["reward/length"] + 3 * last["reward/reward_model"]
    assert last["reward"] == pytest.approx(parts, rel=1e-5)
    assert "eval/reward_model" in first
    assert_reported(home / "judged")


def test_several_models_score_each_with_its_own_tokenizer(home: Path) -> None:
    """A reward model that reads tokens of its own making, and a process reward model."""
    tokenizer = load_tokenizer(str(home / "model"))
    tokenizer.save_pretrained(home / "judge")
    own = {"role": {"model": {"path": "judge"}}, "tokenizer": "own", "chat_template": "none"}
    config = scored_ppo("several")
    del config["reward_model"]
    config["reward_models"] = {
        "whole": {**own, "weight": 2.0},
        "steps": {**own, "steps": {"separator": " ", "take": "mean"}},
    }
    write_config(home, "several", config)
    outcome = run_here(home, "ppo", "several.yaml")
    assert outcome.code == 0, outcome.err
    table = parquet.read_table(home / "several" / "trajectories" / "step-000001.parquet")
    judge = AutoModelForSequenceClassification.from_pretrained(
        home / "judge", num_labels=1, dtype=torch.bfloat16
    ).float()

    def scores(tokens: list[int]) -> Any:
        with torch.no_grad():
            hidden = judge.model(torch.tensor([tokens])).last_hidden_state[0]
            return hidden.float() @ judge.score.weight[0].float()

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for row in table.to_pylist():
        whole = [*encoded(row["prompt"]), *encoded(row["response"]), tokenizer.eos_token_id]
        assert row["reward_whole"] == pytest.approx(float(scores(whole)[-1]), abs=0.2)
        assert 0 <= row["reward_steps"] <= 1
        tokens, ends = encoded(row["prompt"]), []
        for i, step in enumerate(p for p in row["response"].split(" ") if p.strip()):
            tokens += encoded(f" {step}" if i else step)
            ends.append(len(tokens) - 1)
        if ends:
            found = torch.sigmoid(scores(tokens)[ends]).mean()
            assert row["reward_steps"] == pytest.approx(float(found), abs=0.1)
    assert_reported(home / "several")


@pytest.mark.engine
@pytest.mark.slow
def test_a_reward_model_on_ranks_of_its_own_scores_the_same(
    home: Path,
    shared_ray: tuple[str, ...],
    three_raylets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one rank, and a node of its own, to the bit; divided over two ranks but for rounding."""
    exact = {"path": "judge", "dtype": "float32"}
    config = scored_ppo("", model=exact, zero={"stage": 3})
    config["run"] |= {"steps": 2, "eval_every": 2}
    config["cluster"] |= {"hardware": "cpu", "host_memory": "64GB"}  # a joined cluster's plan
    for role in ("actor", "critic"):
        config[role]["model"] |= {"dtype": "float32"}
    write_config(home, "apart", config)
    one, two = ("--cluster.reward_ranks", "1"), ("--cluster.reward_ranks", "2")
    own_nodes = [f"--cluster.own_nodes.{group}=1" for group in ("actor", "reward", "engines")]
    at = ("--cluster.where", "ray", "--cluster.device", "cpu", "--cluster.address", three_raylets)
    nodes = noted_nodes(monkeypatch)
    for name, flags in (
        ("together", shared_ray),
        ("two", (*shared_ray, *two)),
        ("one", (*at, *one, "--cluster.nodes", "3", *own_nodes)),
    ):
        outcome = run_here(home, "ppo", "apart.yaml", "--run.directory", name, *flags)
        assert outcome.code == 0, outcome.err
    assert len(set(nodes[-3:])) == 3
    together, divided = metrics(home / "together"), metrics(home / "two")
    assert metrics(home / "one") == together
    for name in ("reward/reward_model", "eval/reward_model", "value_loss", "actor/grad_norm"):
        wanted = column(together, name)
        assert wanted, name
        np.testing.assert_allclose(column(divided, name), wanted, rtol=1e-3, atol=1e-4)
    rows = read_ledger(home / "two" / "ledger.jsonl")
    # The controller is the tests' own process, which holds what earlier ones have left.
    check_sane([row for row in rows if row.process != "controller"])
    scorers = {"reward rank 0", "reward rank 1"}
    processes = {row.process for row in rows if row.phase == "score"}
    assert processes == {"controller", "rank 0", *scorers, "engine 0", "node 0"}


def test_settings_of_a_tokenizer_that_is_not_its_own_are_refused(home: Path) -> None:
    config = scored_ppo("steps")
    config["reward_model"]["steps"] = {"separator": " "}
    write_config(home, "steps", config)
    outcome = run_here(home, "ppo", "steps.yaml")
    assert outcome.code == 4
    assert "reward-tokenizer" in outcome.err


def test_scores_are_sampled_alone_and_replayed_without_the_model(home: Path) -> None:
    config = scored_ppo("scored")
    config["run"]["eval_every"] = None
    write_config(home, "scored", config)
    for words in (
        ("sample", "scored.yaml"),
        ("ppo", "scored.yaml", "--run.directory", "live"),
        ("ppo", "scored.yaml", "--run.directory", "replayed", "--replay", "scored"),
    ):
        outcome = run_here(home, *words)
        assert outcome.code == 0, outcome.err
    (scored,), (live,), (replayed,) = (metrics(home / n) for n in ("scored", "live", "replayed"))
    assert scored["reward/reward_model"] == live["reward/reward_model"]
    assert replayed == {name: live[name] for name in replayed}
    flags = "--run.directory", "planned", "--replay", "scored", "--dry-run"
    told = run_here(home, "ppo", "scored.yaml", *flags).out
    assert "judge" not in told.partition("Processes")[2]


SAID = ("1+2=", " #### 3"), ("3+4=", " ## 7 #")


def trajectories(home: Path) -> list[Trajectory]:
    tokenizer = load_tokenizer(str(home / "model"))

    def tokens(text: str) -> Any:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False))

    def sampled(index: int, prompt: str, response: str) -> Trajectory:
        said = [{"role": "user", "content": prompt}]
        asked = Prompt(index, tokens(prompt), prompt, messages=said)
        own = np.append(tokens(response), tokenizer.eos_token_id)
        return single_turn(asked, 0, own, np.zeros(len(own), np.float32), response, "stop", 0)

    return [
        replace(sampled(i, *texts), group=i) for i, texts in enumerate([*SAID, *SAID[::-1], *SAID])
    ]


def transformers_scores(home: Path, given: Sequence[Trajectory]) -> list[float]:
    """Return transformers' scores of the actor's tokens, which its own tokenizer makes of the
    texts, too."""
    judge = AutoModelForSequenceClassification.from_pretrained(
        home / "judge", num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        rows = (np.append(t.prompt.tokens, t.response_tokens) for t in given)
        hidden = (judge.model(torch.from_numpy(row)[None]).last_hidden_state for row in rows)
        return [float(states[0, -1] @ judge.score.weight[0]) for states in hidden]


def far(url: str, **settings: Any) -> dict[str, RewardConfig]:
    return {"far": RewardConfig(http=HttpReward(urls=(url,), retries=0, **settings))}


def asked_at(url: str, given: Sequence[Trajectory], **settings: Any) -> list[float]:
    with open_rewards(far(url, **settings)) as scorer:
        return [t.rewards[0].value for t in scorer(given)]


@pytest.mark.slow
def test_reward_models_are_served(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models read the actor's tokens, texts, and steps; a rule is served beside them."""
    load_tokenizer(str(home / "model")).save_pretrained(home / "judge")
    config = scored_ppo("served", model={"path": "judge", "dtype": "float32"})
    role = config["reward_model"]["role"]
    own = {"role": role, "tokenizer": "own", "chat_template": "none"}
    steps = {**own, "steps": {"separator": "#", "take": "last"}}
    config["reward_models"] = {"texts": own, "steps": steps}
    write_config(home, "served", config)
    server = Command(home, "serve-reward", "served.yaml", "--port", "0")
    key = server.read_until("Header of every caller").split()[-1]
    monkeypatch.setenv("SERVED_KEY", key)
    base = server.read_until("POST ").removeprefix("POST ").rpartition("/")[0]
    ask = partial(asked_at, api_key="SERVED_KEY")
    try:
        given = trajectories(home)
        want = transformers_scores(home, given)
        assert max(want) - min(want) > 0.5
        for name in ("reward_model", "texts"):
            assert ask(f"{base}/{name}", given) == pytest.approx(want, abs=1e-3)
        assert all(0 <= value <= 1 for value in ask(f"{base}/steps", given))
        assert ask(f"{base}/length", given) == [0.0] * len(given)
        plain = ask(f"{base}/texts", given, format="openrlhf")
        assert plain == pytest.approx(want, abs=1e-3)
        with pytest.raises(PlimsollError, match=r"reads the actor.*tokens \(tokenizer: actor\)"):
            ask(f"{base}/reward_model", given, format="openrlhf")
    finally:
        server.process.send_signal(signal.SIGINT)
    assert server.finish().code in (0, 130)


@pytest.mark.slow
def test_a_reward_model_that_vllm_serves(home: Path) -> None:
    """It reads the actor's tokens, or what its own tokenizer and template make of the texts."""
    load_tokenizer(str(home / "model")).save_pretrained(home / "judge")
    given = trajectories(home)
    want = transformers_scores(home, given)
    with vllm_serving(home / "judge") as url:
        assert asked_at(url, given, format="vllm") == pytest.approx(want, abs=1e-3)
        own = {"format": "vllm", "tokenizer": str(home / "judge"), "chat_template": "none"}
        assert asked_at(url, given, **own, batch=4) == pytest.approx(want, abs=1e-3)


@contextmanager
def vllm_serving(model: Path) -> Iterator[str]:
    """vLLM's own server of a reward model, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    words = ["--model", str(model), "--runner", "pooling", "--dtype", "float32"]
    words += ["--enforce-eager", "--max-model-len", "64", "--port", str(port)]
    with (model.parent / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=os.environ | own,
            stdout=log,
            stderr=log,
        )
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (model.parent / "vllm.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/classify"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.RequestError:
        return False


def test_a_reward_model_that_gives_nan_stops_the_run_and_is_named(home: Path) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(home / "judge", num_labels=1)
    with torch.no_grad():
        judge.score.weight.fill_(torch.nan)
    judge.save_pretrained(home / "broken")
    config = scored_ppo("broken_run", model={"path": "broken"})
    config["run"]["eval_every"] = None
    write_config(home, "broken", config)
    outcome = run_here(home, "ppo", "broken.yaml")
    assert outcome.code == 1
    assert re.search(r"'reward_model' \(broken\), at row .*\[nan\]", outcome.err)
    assert not (home / "broken_run" / "trajectories").exists()
