"""Environments and rewards that were written for TRL and for OpenRLHF, in real runs as they are.

Each is of the form that their documentation gives (TRL 1.16: OpenEnv integration, environment
classes and reward functions; OpenRLHF 0.11: examples/python/agent_func*.py), written anew. The
policy is a random model; whole tool calls are among its tokens.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, TEMPLATES
from commands import Outcome, column, metrics, run_here, write_config
from random_models import write_random_model

from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS, PROMPTS, RESPONSES = 2, 4, 4
WORDS = ("crane", "coral", "canoe")


def call(name: str, **arguments: str | int) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


CALLS = [
    *(call("guess", guess=f"[{word}]") for word in WORDS),
    *(call("echo", message=message) for message in ("ahoy", "land ho")),
    *(call("increment", by=by) for by in (1, 2)),
    call("fathoms", metres=1),
    call("guess", word="crane"),
]
TRL = '''
import asyncio


class EchoToolEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back.

        Args:
            message: The message to echo.

        Returns:
            The echoed message.
        """
        self.reward = 0.1 * len(message)
        return message


class WordleEnv:
    TRIES = 2

    def reset(self, secret, **kwargs) -> str | None:
        self.secret, self.tries, self.reward, self.done = secret, 0, 0.0, False
        return f"Guess a word of {len(secret)} letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, as '[abcde]'.

        Returns:
            A letter for each letter of the guess.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[]")
        marks = ["G" if a == b else "Y" if a in self.secret else "X"
                 for a, b in zip(word, self.secret)]
        self.tries += 1
        self.reward = float(word == self.secret)
        self.done = word == self.secret or self.tries == self.TRIES
        return " ".join(marks)


class CounterEnv:
    """Owns its reward; one of its tools is asynchronous."""

    def reset(self, **kwargs):
        self.count = 0

    async def increment(self, by: int) -> int:
        """
        Increment the counter.

        Args:
            by: What to add.
        """
        await asyncio.sleep(0)
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def of_words(environments, prompts, completions, secret, **kwargs) -> list[float]:
    """Of a conversation, as TRL has it: the share of green letters in the last result."""
    assert prompts[0][0]["role"] == "user" and "log_metric" in kwargs
    found = []
    for env, completion, word in zip(environments, completions, secret, strict=True):
        assert env.secret == word and completion[0]["role"] == "assistant"
        results = [m["content"] for m in completion if m["role"] == "tool"]
        found.append(results[-1].splitlines()[0].count("G") / 5 if results else None)
    return found


async def of_echoes(environments, **kwargs) -> list[float | None]:
    """Of one kind of environment alone, as for TRL's mixed ones."""
    await asyncio.sleep(0)
    return [env.reward if isinstance(env, EchoToolEnv) else None for env in environments]


def fathoms(metres: int) -> float:
    """
    Metres as fathoms.

    Args:
        metres: How many.
    """
    return metres / 2
'''
AGENT = """
import random

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(1, 2)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        assert states["observation_text"].startswith("<|im_start|>system")
        done = self.step_idx >= self.max_steps
        found = float(states["action_text"].count("a"))
        reward = torch.tensor(found) if done else torch.tensor(0)
        feedback = "<|im_end|>" if done else (
            "" if "<|im_end|>" in states["action_text"] else "<|im_end|>"
        ) + "\\n<|im_start|>user\\nOnce more.<|im_end|>\\n<|im_start|>assistant\\n"
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward, "turn_count": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("others")
    [qwen] = [family for family in FAMILIES if family.name == "qwen2.5"]
    tokenizer = copy.deepcopy(qwen.template.tokenizer)
    tokenizer.add_tokens(CALLS)
    tokenizer.eos_token = qwen.ends[0]
    for tools in ("echo", "guess", "increment", "fathoms", "echo or guess"):
        calls = [own for own in CALLS if any(f'"{tool}"' in own for tool in tools.split())]
        liked = tokenizer.convert_tokens_to_ids([*qwen.ends, *calls])
        write_random_model(home / f"calling {tools}", tokenizer, 320, liked)
    # One that ends nearly all of its turns itself.
    liked = tokenizer.convert_tokens_to_ids([*qwen.ends, CALLS[0]])
    write_random_model(home / "calling one word", tokenizer, 320, liked, how_much=8.0)
    shutil.copy(TEMPLATES / "qwen2.5.jinja", home)
    (home / "trls.py").write_text(TRL)
    (home / "agent_func.py").write_text(AGENT)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Game {i}."}],
            "secret": WORDS[i % 3],
            "environment": ("words", "echoes")[i % 2],
        }
        for i in range(PROMPTS * STEPS)
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(home)
        yield home


def train(
    home: Path,
    name: str,
    environments: dict[str, Any],
    rewards: dict[str, Any],
    *,
    calling: str,
    **source: str,
) -> Outcome:
    config = {
        "run": {"directory": name, "steps": STEPS, "tensorboard": False},
        "cluster": {"where": "local", "threads": 1},
        "data": {
            "train": {"path": "rows.jsonl", "messages": "prompt", **source},
            "chat_template": "qwen2.5.jinja",
            "max_tokens": 900,
        },
        "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 4096},
        "actor": {"model": {"path": f"calling {calling}", "dtype": "float32"}},
        "rewards": rewards,
        "environments": {
            key: {"max_turns": 12, "max_tokens": 1024, "retries": 0, **own}
            for key, own in environments.items()
        },
        "rollout": {
            "transformers": {"max_sequences": 16},
            "dtype": "float32",
            "sampling": {"max_new_tokens": 12},
        },
    }
    write_config(home, name, config)
    outcome = run_here(home, "grpo", f"{name}.yaml")
    assert outcome.code == 0, outcome.err
    assert max(column(metrics(home / name), "mismatch/abs")) < 1e-4
    return outcome


def episodes(home: Path, name: str) -> list[Trajectory]:
    files = RunDirectory(home / name).trajectories().values()
    found = [t for file in files for t in read_trajectories(file)]
    assert len(found) == STEPS * PROMPTS * RESPONSES
    return found


def results(t: Trajectory) -> list[str]:
    """What tools said, in their order; under the last of a turn what is wrong with other calls."""
    said = "\n".join(turn.text for turn in t.turns if turn.role == "tool")
    return re.findall(r"^(?:echo|guess|increment|fathoms): (.*)$", said, re.MULTILINE)


def parts(t: Trajectory) -> dict[str, float]:
    return {part.name: part.value for part in t.rewards}


def test_trls_echo_with_a_reward_of_its_environments(home: Path) -> None:
    rewards = {"echoed": {"name": "trls:reward_func"}}
    train(home, "echo", {"echo": {"name": "trls:EchoToolEnv"}}, rewards, calling="echo")
    lengths = set()
    for t in episodes(home, "echo"):
        echoed = [one for one in results(t) if one in ("ahoy", "land ho")]
        expected = 0.1 * len(echoed[-1]) if echoed else 0.0
        assert parts(t) == {"environment": 0.0, "echoed": pytest.approx(expected)}
        lengths.add(len(echoed))
    assert len(lengths) > 2  # of no call, of one, of several turns


def test_trls_wordle_with_rewards_of_conversations_and_columns(home: Path) -> None:
    rewards = {"won": {"name": "trls:reward_func"}, "green": {"name": "trls:of_words"}}
    train(home, "wordle", {"wordle": {"name": "trls:WordleEnv"}}, rewards, calling="guess")
    found = episodes(home, "wordle")
    for t in found:
        secret, said = str(t.prompt.columns["secret"]), results(t)
        green = said[-1].count("G") / 5 if said else 0.0
        assert parts(t) == {
            "environment": 0.0,
            "won": float("G G G G G" in said and marks(secret, said)),
            "green": pytest.approx(green),
        }
    said = [line for t in found for line in results(t)]
    assert {"G G G G G", "Error: Game over."} < set(said)
    assert sum(t.figures.get("tool_calls_failed", 0) for t in found) == said.count(
        "Error: Game over."
    )


def marks(secret: str, said: Sequence[str]) -> bool:
    """Whether the last guess that counted was right: the game is over at the first right one."""
    counted = [line for line in said if not line.startswith("Error")]
    return counted[-1] == "G G G G G"


def test_trls_counter_owns_its_reward_and_awaits(home: Path) -> None:
    train(home, "counter", {"counter": {"name": "trls:CounterEnv"}}, {}, calling="increment")
    found = episodes(home, "counter")
    for t in found:
        numbers = [int(one) for one in results(t) if one.isdigit()]
        assert parts(t) == {"environment": float(numbers[-1]) if numbers else 0.0}
        assert numbers == sorted(numbers)
    assert max(parts(t)["environment"] for t in found) >= 3


def test_trls_mixed_environments_by_a_column(home: Path) -> None:
    rewards = {"won": {"name": "trls:reward_func"}, "echoed": {"name": "trls:of_echoes"}}
    environments = {"words": {"name": "trls:WordleEnv"}, "echoes": {"name": "trls:EchoToolEnv"}}
    calling = "echo or guess"
    train(home, "mixed", environments, rewards, calling=calling, environment="environment")
    found = episodes(home, "mixed")
    for t in found:
        own = parts(t)
        assert own["echoed"] == (own["won"] if t.prompt.environment == "echoes" else 0.0)
    assert {t.prompt.environment for t in found if results(t)} == {"words", "echoes"}


def test_functions_as_tools_in_a_process(home: Path) -> None:
    tools = {"name": "functions", "tools": ["trls:fathoms"], "process": True, "at_once": 2}
    train(home, "functions", {"tools": tools}, {"length": {"name": "length"}}, calling="fathoms")
    said = [line for t in episodes(home, "functions") for line in results(t)]
    assert "0.5" in said


def test_an_agent_file_of_openrlhf(home: Path) -> None:
    environments = {"agent": {"name": "agent_func.py", "tool_format": "none"}}
    train(home, "agent", environments, {}, calling="one word", reference="secret")
    found = episodes(home, "agent")
    ended = [t for t in found if t.finish_reason == "stop"]
    for t in ended:
        spoken = [turn for turn in t.turns if turn.role == "assistant"]
        assert len(spoken) in (2, 3)
        assert parts(t) == {"environment": float(spoken[-1].text.count("a"))}
        assert t.figures["turn_count"] == sum(range(1, len(spoken) + 1))
        assert "Once more." in t.turns[1].text
    assert len({parts(t)["environment"] for t in ended}) > 1
