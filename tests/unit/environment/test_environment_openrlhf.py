"""Agent files of the shapes that OpenRLHF documents, written anew."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.agents.executor import ExecutorAgent
from plimsoll.environment.agents.play import play_agent
from plimsoll.environment.calls import EnvironmentFailed
from plimsoll.environment.episode import Policy, Table
from plimsoll.environment.opening import Factory, opened
from plimsoll.environment.openrlhf import AgentExecutorBase, load_agent
from plimsoll.environment.protocol import Message, Observation, Reply, Step
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt, Trajectory, Transcript, single_turn
from plimsoll.rollout.protocol import Request

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
EXECUTOR = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            tokens, ranges, logprobs = hf_tokenizer(prompt), [], []
            for turn in range(2):
                output = (await llm_engine.generate(list(tokens), sampling_params)).outputs[0]
                ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
                tokens = tokens + output.token_ids
                logprobs += [one[t].logprob for t, one in zip(output.token_ids, output.logprobs)]
                if turn == 0:
                    tokens = tokens + hf_tokenizer("?")
            return {
                "prompt": prompt,
                "label": label,
                "observation_tokens": tokens,
                "action_ranges": ranges,
                "rollout_log_probs": logprobs,
                "truncated": output.finish_reason == "length",
                "reward": sum(logprobs),
                "scores": 1,
                "extra_logs": {"turns": 2},
            }
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
    factory = opened(path)
    assert isinstance(factory, Factory)
    return factory(**options)


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
    factory = opened(agent_file(tmp_path, MULTI_TURN))
    assert isinstance(factory, Factory)
    row = {"prompt": PROMPT, "label": "x"}
    for _ in range(2):
        _, (first,) = asyncio.run(episode(factory(), row, "a"))
        assert not first.done


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("states[\"observation\"] + HINT", "'other'"), "replaced the prompt by 'other'"),
        (('"environment_feedback"', '"feedback"'), "dict with 'environment_feedback', and gave: "),
        (('"rewards": torch', '"rewards": "no", "r": torch'), "gave 'no' as rewards, no number"),
        (("torch.tensor(0)", "float('nan')"), "gave nan as rewards"),
        (("self.turn += 1", 'states["sampling_params"].max_tokens = 3'), "other sampling param"),
        (('"extra_logs": {', '"environment_images": [1], "extra_logs": {'), "gave images"),
        (('else "<|user|>', 'else 7 or "<|user|>'), r"gave 7 (int) as 'environment_feedback'"),
    ],
)  # fmt: skip
def test_what_an_agent_does_that_cannot_be_followed(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN, change))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(episode(environment, {"prompt": PROMPT, "label": "x"}, "a"))
    assert said in str(caught.value)


def test_a_row_without_a_prompt_as_text(tmp_path: Path) -> None:
    environment = environment_of(agent_file(tmp_path, MULTI_TURN))
    with pytest.raises(ConfigError, match="the column prompt_text is to have it"):
        asyncio.run(episode(environment, {"prompt": [{"role": "user", "content": "?"}]}))


def test_loading_leaves_no_stand_in_behind(tmp_path: Path) -> None:
    before = {name: module for name, module in sys.modules.items() if "openrlhf" in name}
    load_agent(agent_file(tmp_path, MULTI_TURN))
    after = {name for name in sys.modules if name.split(".")[0] == "openrlhf"}
    assert after == {name for name in before if name.split(".")[0] == "openrlhf"}


def test_an_agent_file_that_raises_is_told(tmp_path: Path) -> None:
    path = agent_file(tmp_path, MULTI_TURN, ("import torch", "import torch, keelhaul"))
    with pytest.raises(ConfigError, match="No module named 'keelhaul'"):
        load_agent(path)
    assert "openrlhf" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "has no class AgentExecutor"),
        ("class AgentExecutor: ...", "has no class AgentExecutor"),
        (
            "from openrlhf.utils.agent import SingleTurnAgentExecutor as S\n"
            "class AgentExecutor(S): ...",
            "For one turn with a reward no agent is needed",
        ),
        (
            "from openrlhf.utils.agent import AgentExecutorBase as B\nclass AgentExecutor(B):\n"
            "    def __init__(self): raise OSError('no port')",
            r"AgentExecutor() raised OSError: no port",
        ),
        ("import openrlhf.models", "No module named 'openrlhf.models'"),
    ],
)
def test_files_without_a_usable_agent(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_agent(str(path))
    assert said in str(caught.value)


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def sample(request: Request, episode: int) -> list[Trajectory]:
    """Goes on with the letters after the last one."""
    await asyncio.sleep(0)
    [prompt] = request.prompts
    last = int(prompt.tokens[-1])
    found = np.arange(last + 1, last + 1 + min(2, *request.most_tokens()))
    text, logprobs = "".join(map(chr, found)), np.full(len(found), -0.5, np.float32)
    return [single_turn(prompt, 0, found, logprobs, text, "stop", weight_version=3)]


def played(path: str, times: int = 1) -> list[Trajectory]:
    executor = opened(path)
    assert isinstance(executor, AgentExecutorBase)
    template = SimpleNamespace(tokenizer=tokens_of)
    speech: Any = SimpleNamespace(template=template, text=lambda ids: "".join(map(chr, ids)))
    table = Table("own", EnvironmentConfig(name=path), speech, most_prompt=9)

    async def run() -> list[Trajectory]:
        agent = ExecutorAgent(executor)
        policies = (Policy(sample, i, SamplingConfig(), i) for i in range(times))
        rows = (Prompt(i, np.array(tokens_of(f"p{i % 2}")), f"p{i % 2}") for i in range(times))
        work = [
            play_agent(agent, table, row, 0, i, policy)
            for i, (row, policy) in enumerate(zip(rows, policies, strict=True))
        ]
        return await asyncio.gather(*work)

    return asyncio.run(run())


def all_tokens(episode: Trajectory) -> list[int]:
    return [*episode.prompt.tokens.tolist(), *episode.response_tokens.tolist()]


def test_an_executor_plays_whole_episodes(tmp_path: Path) -> None:
    (one,) = played(agent_file(tmp_path, EXECUTOR))
    assert (one.prompt.tokens.tolist(), all_tokens(one)) == (
        tokens_of("p0"),
        tokens_of("p012?@A"),
    )
    assert [(turn.role, turn.begin, turn.end, turn.text) for turn in one.turns] == [
        ("assistant", 0, 2, "12"),
        ("user", 2, 3, "?"),
        ("assistant", 3, 5, "@A"),
    ]
    assert one.loss_mask.tolist() == [True, True, False, True, True]
    assert one.weight_versions.tolist() == [3, 3, 0, 3, 3]
    assert (one.reward, one.finish_reason) == (-2.0, "stop")
    assert one.figures == {"scores": 1.0, "turns": 2.0}
    said = [("assistant", "12"), ("user", "?"), ("assistant", "@A")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert one.transcript == Transcript(None, messages)


def test_an_executor_serves_episodes_at_once(tmp_path: Path) -> None:
    found = played(agent_file(tmp_path, EXECUTOR), times=20)
    assert [all_tokens(one)[:2] for one in found] == [[112, 48 + i % 2] for i in range(20)]


@pytest.mark.parametrize(
    "change",
    [
        ("return {", "tokens[-1] += 1\n            return {"),
        ("return {", "tokens[2] += 1\n            return {"),
        ("return {", "ranges[1] = (4, 7)\n            return {"),
        ("return {", "ranges.append(ranges[1])\n            return {"),
        ("return {", "ranges.append((7, 900))\n            return {"),
    ],
)
def test_tokens_that_no_engine_gave_are_refused(change: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="the engine gave no such answer"):
        played(agent_file(tmp_path, EXECUTOR, change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"observation_tokens"', '"tokens"'), "gave no observation_tokens"),
        (('"action_ranges": ranges', '"action_ranges": []'), "nothing was sampled"),
        (("return {", "return 3 or {"), "a dict is needed"),
        (("sampling_params)).out", "sampling_params, {'image': 1})).out"), "images"),
        (("tokens, ranges", "sampling_params.temperature = 0.1; tokens, ranges"), "temperature"),
    ],
)
def test_what_an_executor_gives_that_is_not_of_the_form(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        played(agent_file(tmp_path, EXECUTOR, change))


def test_an_executors_server_in_a_thread_asks_the_same_engine(tmp_path: Path) -> None:
    """As of an executor that serves an OpenAI-compatible endpoint within."""
    asked = "llm_engine.generate(list(tokens), sampling_params)"
    threaded = (f"await {asked}", f"await asyncio.to_thread(asyncio.run, {asked})")
    imports = ("from openrlhf", "import asyncio\n    from openrlhf")
    (one,) = played(agent_file(tmp_path, EXECUTOR, threaded, imports))
    assert all_tokens(one) == tokens_of("p012?@A")
