"""Agent files of the shapes that OpenRLHF documents, written anew."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from plimsoll.environment.opening import EnvironmentFactory, open_environment
from plimsoll.environment.protocol import Message, Observation, Reply, Step
from plimsoll.errors import ConfigError
from plimsoll.interop.environments.openrlhf import load_agent

PROMPT = "<|user|>Spell it.<|assistant|>"
MULTI_TURN = """
    import torch
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
    from openrlhf.utils.logging_utils import init_logger

    logger = init_logger(__name__)

    class AgentInstance(AgentInstanceBase):
        def __init__(self, *args, **kwargs):
            self.turn = 0

        async def reset(self, states: dict, **kwargs):
            return {"observation": states["observation"] + HINT}

        async def step(self, states: dict, **kwargs):
            self.turn += 1
            done = self.turn == 2
            seen.append(states)
            right = states["label"] in states["action_text"]
            return {
                "rewards": torch.tensor([float(right)]) if done else torch.tensor(0),
                "scores": torch.tensor(float(right)),
                "environment_feedback": "<|end|>" if done else "<|user|>Again.<|assistant|>",
                "done": done,
                "sampling_params": states.get("sampling_params", None),
                "extra_logs": {"turns": torch.tensor(self.turn), "note": "text"},
            }

    HINT, seen = "", []

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)
"""


def agent_file(folder: Path, text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "agent.py"
    path.write_text(dedent(text))
    return str(path)


def reply(text: str) -> Reply:
    return Reply(text, Message("assistant", text), (), None)


async def episode(environment: Any, row: dict[str, Any], *texts: str) -> tuple[Any, list[Step]]:
    begun = await environment.reset(row)
    return begun, [await environment.step(reply(text)) for text in texts]


def environment_of(path: str, **options: Any) -> Any:
    factory = open_environment(path)
    assert isinstance(factory, EnvironmentFactory)
    return factory.make(**options)


def test_an_agent_plays_two_turns(tmp_path: Path) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN), sampling={"max_tokens": 9})
    row = {"prompt_text": PROMPT, "prompt": [{"role": "user", "content": "?"}], "label": "keel"}
    begun, (first, second) = asyncio.run(episode(environment, row, "kil<|end|>", "keel<|end|>"))
    assert begun == Observation(())
    assert first.observation == Observation((Message("raw", "<|user|>Again.<|assistant|>"),))
    assert (first.done, first.reward, second.done, second.reward) == (False, 0.0, True, 1.0)
    assert first.figures == {"scores": 0.0, "turns": 1.0}
    assert second.figures == {"scores": 1.0, "turns": 2.0}


def test_an_agent_sees_the_whole_text(tmp_path: Path) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN), sampling={"max_tokens": 9})
    row = {"prompt": PROMPT, "reference_value": "keel"}
    asyncio.run(episode(environment, row, "a", "b"))
    first, second = sys.modules[type(environment._agent).__module__].seen
    assert first["observation_text"] == PROMPT and first["action_text"] == "a"
    assert second["observation_text"] == f"{PROMPT}a<|user|>Again.<|assistant|>"
    assert second["label"] == "keel" and second["sampling_params"].max_tokens == 9


def test_an_agent_may_add_to_the_prompt(tmp_path: Path) -> None:
    path = agent_file(tmp_path, MULTI_TURN, ('HINT, seen = ""', 'HINT, seen = "Well: "'))
    begun, _ = asyncio.run(episode(environment_of(path), {"prompt": PROMPT, "label": ""}))
    assert begun == Observation((Message("raw", "Well: "),))


def test_each_episode_has_an_agent_of_its_own(tmp_path: Path) -> None:
    factory = open_environment(agent_file(tmp_path, MULTI_TURN))
    assert isinstance(factory, EnvironmentFactory)
    row = {"prompt": PROMPT, "label": "x"}
    for _ in range(2):
        _, (first,) = asyncio.run(episode(factory.make(), row, "a"))
        assert not first.done


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("states[\"observation\"] + HINT", "'other'"), "replaced the prompt by 'other'"),
        (('"environment_feedback"', '"feedback"'), "dict with 'environment_feedback', and gave: "),
        (('"rewards": torch', '"rewards": "no", "r": torch'), "gave 'no' as rewards, not a finite"),
        (("torch.tensor(0)", "float('nan')"), "gave nan as rewards"),
        (("self.turn += 1", 'states["sampling_params"].max_tokens = 3'), "other sampling param"),
        (('"extra_logs": {', '"environment_images": [1], "extra_logs": {'), "gave images"),
        (('else "<|user|>', 'else 7 or "<|user|>'), r"gave 7 (int) as 'environment_feedback'"),
    ],
)  # fmt: skip
def test_what_an_agent_does_that_cannot_be_followed(
    change: tuple[str, str], why: str, tmp_path: Path
) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN, change))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(episode(environment, {"prompt": PROMPT, "label": "x"}, "a"))
    assert why in str(caught.value)


def test_a_row_without_a_prompt_as_text(tmp_path: Path) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN))
    with pytest.raises(ConfigError, match="Give the column prompt_text"):
        asyncio.run(episode(environment, {"prompt": [{"role": "user", "content": "?"}]}))


def test_loading_leaves_no_stand_in_behind(tmp_path: Path) -> None:
    before = {name: module for name, module in sys.modules.items() if "openrlhf" in name}
    load_agent(agent_file(tmp_path, MULTI_TURN))
    after = {name for name in sys.modules if name.split(".")[0] == "openrlhf"}
    assert after == {name for name in before if name.split(".")[0] == "openrlhf"}


def test_an_agent_file_that_raises_is_reported(tmp_path: Path) -> None:
    path = agent_file(tmp_path, MULTI_TURN, ("import torch", "import torch, keelhaul"))
    with pytest.raises(ConfigError, match="No module named 'keelhaul'"):
        load_agent(path)
    assert "openrlhf" not in sys.modules


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "has no class AgentExecutor"),
        ("class AgentExecutor: ...", "has no class AgentExecutor"),
        (
            "from openrlhf.utils.agent import SingleTurnAgentExecutor as S\n"
            "class AgentExecutor(S): ...",
            "One turn with a reward needs no agent",
        ),
        (
            "from openrlhf.utils.agent import AgentExecutorBase as B\nclass AgentExecutor(B):\n"
            "    def __init__(self): raise OSError('no port')",
            r"AgentExecutor() raised OSError: no port",
        ),
        ("import openrlhf.models", "No module named 'openrlhf.models'"),
        (
            "from openrlhf.utils.agent import AgentExecutorBase as B\nclass AgentExecutor(B):\n"
            "    async def execute(self, **kwargs): return {}",
            "asks the policy's endpoint",
        ),
    ],
)
def test_files_without_a_usable_agent(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_agent(str(path))
    assert why in str(caught.value)
