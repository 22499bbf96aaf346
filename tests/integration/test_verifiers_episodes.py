"""Episodes of real verifiers environments with a policy that speaks by a script: what they are
asked, what they make of it, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from chat_families import FAMILIES, end_tokens
from listeners import listening
from verifiers_cases import TASKSETS, needs_verifiers

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rollout import SamplingConfig, ServeConfig
from plimsoll.environment.adapters import EpisodeAgent
from plimsoll.environment.agents.endpoint import Endpoint
from plimsoll.environment.agents.play import AgentResult, ServedAgent
from plimsoll.environment.episode import Episode, EpisodePolicy, EpisodeRules
from plimsoll.environment.opening import open_environment
from plimsoll.environment.results import EnvironmentFailed
from plimsoll.environment.tool_calls import read_reply
from plimsoll.environment.turn_codec import TurnCodec
from plimsoll.errors import ConfigError
from plimsoll.interop.verifiers.child import PlayerProcess
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.rollout.protocol import Request

pytestmark = needs_verifiers
QWEN = next(family for family in FAMILIES if family.name == "qwen2.5")
END = end_tokens(QWEN)[0]
TASK = {"prompt": "1+1=", "answer": "2"}
HANGING, DYING = {**TASK, "name": "hangs"}, {**TASK, "name": "dies"}


class Stage:
    """An endpoint and agents that tests share, as their processes take seconds to start, and the
    event loop of all."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._endpoint = Endpoint(ServeConfig())
        self._runner.run(self._endpoint.open())
        self._agents: dict[str, EpisodeAgent] = {}

    def play(
        self, name: str, *played: tuple[Episode, dict[str, Any]], seconds: float = 60.0
    ) -> list[Any]:
        """Play episodes of an environment side by side; return results and errors."""
        if name not in self._agents:
            agent = open_environment(f"verifiers:{name}")
            assert isinstance(agent, EpisodeAgent)
            self._agents[name] = agent
        served = ServedAgent(self._agents[name], {}, self._endpoint)

        async def play_one(episode: Episode, task: dict[str, Any]) -> AgentResult:
            async with asyncio.timeout(seconds):
                return await served.play(episode, {"task": task})

        async def play_all() -> list[Any]:
            work = [play_one(*one) for one in played]
            return await asyncio.gather(*work, return_exceptions=True)

        return self._runner.run(play_all())

    def close(self) -> None:
        async def close_all() -> None:
            for agent in self._agents.values():
                assert agent.close is not None
                await agent.close()
            await self._endpoint.close()

        self._runner.run(close_all())
        self._runner.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("tasksets")
    for name, text in TASKSETS.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        stage = Stage()
        yield stage
        stage.close()


def episode_of(*texts: str, **config: Any) -> Episode:
    """An episode whose policy says these texts, one after another."""
    said = iter(texts)

    async def ask(request: Request, episode: int) -> list[Trajectory]:
        [prompt], [most] = request.prompts, request.most_tokens()
        text = next(said)
        tokens = QWEN.template.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = np.array([*tokens, END][:most])
        reason = "stop" if tokens[-1] == END else "length"
        logprobs = np.linspace(-1, -2, len(tokens), dtype=np.float32)
        return [single_turn(prompt, 0, tokens, logprobs, text, reason, weight_version=4)]  # type: ignore[arg-type]

    environment = EnvironmentConfig(name="own", max_tokens=4000, **config)
    codec = TurnCodec(QWEN.template, (END,), partial(read_reply), 400)
    policy = EpisodePolicy(ask, 0, SamplingConfig(max_new_tokens=60), seed=1)
    return Episode(
        EpisodeRules("own", environment, codec, 1000), Prompt(0, np.array([1]), "1+1="), policy
    )


def said_of(failed: object) -> str:
    assert isinstance(failed, EnvironmentFailed), failed
    return failed.failed.said


def texts(episode: Episode) -> list[str]:
    return [episode.rules.codec.decode(one.all_tokens.tolist()) for one in episode.branches]


def test_one_turn_of_many_episodes_side_by_side(stage: Stage) -> None:
    episodes = [episode_of(text) for text in ("it is 2", "it is 3", "2")]
    found = stage.play("sums", *((one, TASK) for one in episodes))
    assert [one.reward for one in found] == [1.0, 0.0, 1.0]
    assert found[0] == AgentResult(1.0, {"replies": 1.0})
    [text] = texts(episodes[0])
    assert text.endswith("user\n1+1=<|im_end|>\n<|im_start|>assistant\nit is 2<|im_end|>")


def test_turns_go_on_after_the_very_tokens_that_were_sampled(stage: Stage) -> None:
    episode = episode_of("3  ", "1", "22")
    assert stage.play("talk", (episode, TASK)) == [AgentResult(1.0, {"replies": 3.0})]
    [branch] = episode.branches
    assert [turn.role for turn in branch.turns] == [*["assistant", "user"] * 2, "assistant"]
    [text] = texts(episode)
    assert "assistant\n3  <|im_end|>\n<|im_start|>user\n1+1=<|im_end|>" in text
    assert branch.turns[1].text == "1+1=" and set(branch.versions) == {0, 4}


def test_tools_are_described_called_and_answer(stage: Stage) -> None:
    call = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
    episode = episode_of(call, "42")
    task = {"prompt": "40+2=", "answer": "42", "system_prompt": "Add."}
    assert stage.play("adding", (episode, task)) == [AgentResult(1.0, {"replies": 2.0})]
    [text] = texts(episode)
    assert "Add two numbers." in text and "<tool_response>\n42\n</tool_response>" in text
    assert text.startswith("<|im_start|>system\nAdd.")
    assert episode.figures["tool_calls"] == 1 and len(episode.branches) == 1


def test_an_episode_without_turns_left_is_scored_as_it_is(stage: Stage) -> None:
    short, cut = episode_of("2", max_turns=1), episode_of("1" * 200, "2", "2")
    found = stage.play("talk", (short, TASK), (cut, TASK))
    assert found == [AgentResult(1.0, {"replies": 1.0}), AgentResult(1.0, {"replies": 3.0})]
    assert (short.reason, cut.reason) == ("turns", "stop")


def test_what_fails_costs_its_own_episode(stage: Stage) -> None:
    raising = {**TASK, "answer": "raises"}
    tasks: list[dict[str, Any]] = [TASK, raising, {"prompt": 7}, {"answer": "2"}]
    whole, raised, wrong, silent = stage.play("sums", *((episode_of("2"), t) for t in tasks))
    assert whole == AgentResult(1.0, {"replies": 1.0})
    assert said_of(raised).startswith(" raised TaskError: ") and "door" in said_of(raised)
    assert said_of(wrong).startswith(" raised ValidationError: ")
    assert "task has no prompt" in said_of(silent)
    episode = episode_of("2")
    [untold] = stage.play("sums", (episode, None))  # type: ignore[arg-type]
    assert "need a column task" in said_of(untold) and not episode.branches


def test_an_agent_that_is_not_to_be_trained_cannot_be_the_policy(stage: Stage) -> None:
    [found] = stage.play("talk", (episode_of("2"), {**TASK, "name": "helped"}))
    assert "'helper' is not to be trained" in said_of(found) and "helper.model" in said_of(found)


def test_a_process_that_dies_costs_its_episodes_and_is_replaced(stage: Stage) -> None:
    hung, died = stage.play("talk", (episode_of("2"), HANGING), (episode_of("2"), DYING))
    assert said_of(died) == said_of(hung) == "'s process ended with exit code 3"
    late, whole = stage.play(
        *("talk", (episode_of("2"), HANGING), (episode_of("2", "2", "2"), TASK)), seconds=20.0
    )
    assert isinstance(late, TimeoutError)
    assert whole == AgentResult(1.0, {"replies": 3.0})


def test_a_process_in_which_nothing_moves_is_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.interop.verifiers.child._END_SECONDS", 1.0)
    [late] = stage.play("talk", (episode_of("2"), {**TASK, "name": "blocks"}), seconds=1.0)
    assert isinstance(late, TimeoutError)
    [whole] = stage.play("talk", (episode_of("2", "2", "2"), TASK))
    assert whole == AgentResult(1.0, {"replies": 3.0})


def test_who_has_no_token_plays_nothing(stage: Stage) -> None:
    assert stage.play("sums", (episode_of("2"), TASK)) == [AgentResult(1.0, {"replies": 1.0})]
    players = [one for one in psutil.Process().children() if "player.py" in str(one.cmdline())]
    places = listening(players)
    assert {address for address, _ in places} == {"127.0.0.1"}, places
    asked = {"task": TASK, "base_url": "http://127.0.0.1:9/v1", "api_key": "key"}
    for headers, status in (({}, 401), ({"Authorization": "Bearer x"}, 401), ({"Host": "x"}, 421)):
        answers = [
            httpx.post(f"http://127.0.0.1:{port}/play", json=asked, headers=headers).status_code
            for _, port in places
        ]
        assert status in answers and 200 not in answers


@pytest.mark.usefixtures("stage")
def test_a_process_whose_episodes_wait_for_the_policy_ends_by_itself() -> None:
    async def play() -> list[Any]:
        asked = asyncio.Event()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()

        server = await asyncio.start_server(hear, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        process = PlayerProcess("talk")
        playing = [
            asyncio.create_task(process.play({"task": TASK}, base_url=url, api_key="key"))
            for _ in range(4)
        ]
        await asked.wait()
        await process.close()
        server.close()
        return await asyncio.gather(*playing, return_exceptions=True)

    said = {said_of(result) for result in asyncio.run(play())}
    assert said == {"'s process ended with exit code 0"}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sumz", {}, "setup-verifiers --package"),
        ("sums", {"agent": {"max_turn": 3}}, "agent.max_turn: Extra inputs"),
    ],
)
@pytest.mark.usefixtures("stage")
def test_what_cannot_be_opened_is_told(name: str, options: dict[str, Any], said: str) -> None:
    agent = open_environment(f"verifiers:{name}")
    with pytest.raises(ConfigError, match=f"verifiers cannot open '{name}'") as caught:
        agent.check(options)
    assert said in str(caught.value)
