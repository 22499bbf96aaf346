"""Episodes that agents play by calls: exact tokens, branches, limits, the endpoint's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from chat_families import FAMILIES, Family, end_tokens

from plimsoll.config.rollout import EnvironmentConfig, SamplingConfig, ServeConfig
from plimsoll.environment.agents import Endpoint
from plimsoll.environment.episode import CallRefused, Episode, EpisodePolicy, EpisodeRules
from plimsoll.environment.messages import TurnCodec
from plimsoll.environment.tool_calls import read_reply
from plimsoll.machine.guard import MOST_BYTES
from plimsoll.records import WEIGHT_VERSIONS, Prompt, Trajectory, single_turn
from plimsoll.sampler.protocol import Request

BY_NAME = {family.name: family for family in FAMILIES}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def episode_of(family: Family, *texts: str, **config: Any) -> Episode:
    """An episode whose policy says these texts, one after another, each with its end of turn."""
    said = iter(texts)

    async def ask(request: Request, episode: int) -> list[Trajectory]:
        [prompt], [most] = request.prompts, request.most_tokens()
        text = next(said)
        tokens = family.template.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = np.array([*tokens, end_tokens(family)[0]][:most])
        reason = "stop" if tokens[-1] == end_tokens(family)[0] else "length"
        logprobs = np.linspace(-1, -2, len(tokens), dtype=np.float32)
        return [single_turn(prompt, 0, tokens, logprobs, text, reason, weight_version=4)]  # type: ignore[arg-type]

    environment = EnvironmentConfig(name="own", max_tokens=4000, **config)
    codec = TurnCodec(family.template, tuple(end_tokens(family)), partial(read_reply), 400)
    policy = EpisodePolicy(ask, 0, SamplingConfig(max_new_tokens=90), seed=1)
    rules = EpisodeRules("own", environment, codec, max_prompt_tokens=1000)
    return Episode(rules, Prompt(0, np.array([1]), ""), policy)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def two_turns(episode: Episode, replied: dict[str, Any]) -> None:
    first = [user("two and two?")]
    await episode.chat(first, ())
    await episode.chat([*first, replied, user("and two?")], ())


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral-v0.3", "gemma2", "glm-4"])
def test_a_conversation_goes_on_after_the_very_tokens_that_were_sampled(name: str) -> None:
    episode = episode_of(BY_NAME[name], "it is four  ", "six")
    asyncio.run(two_turns(episode, {"role": "assistant", "content": "it is four"}))
    [branch] = episode.branches
    assert [turn.role for turn in branch.turns] == ["assistant", "user", "assistant"]
    first = branch.turns[0]
    own = end_tokens(BY_NAME[name])[0]
    assert branch.tokens[first.end - 1] == own and all(branch.loss_mask[: first.end])
    assert branch.turns[1].text == "and two?" and branch.columns[WEIGHT_VERSIONS][0] == 4


def test_another_past_is_a_branch() -> None:
    episode = episode_of(BY_NAME["qwen2.5"], "four", "six")
    asyncio.run(two_turns(episode, {"role": "assistant", "content": "five"}))
    assert [len(branch.turns) for branch in episode.branches] == [1, 1]
    text = episode.rules.codec.decode(episode.branches[1].prompt.tokens.tolist())
    assert "five<|im_end|>" in text and "and two?" in text


@pytest.mark.parametrize(("rewritten", "branches"), [("keep", 1), ("branch", 2)])
def test_a_template_that_drops_thoughts_goes_on_or_branches(rewritten: str, branches: int) -> None:
    thought = "<think>\nhm\n</think>\n\nfour"
    episode = episode_of(BY_NAME["qwen3"], thought, "six", rewritten=rewritten)
    asyncio.run(two_turns(episode, {"role": "assistant", "content": thought}))
    assert len(episode.branches) == branches
    last = episode.rules.codec.decode(episode.branches[-1].all_tokens.tolist())
    assert ("hm" in last) == (rewritten == "keep") and "four" in last


def test_tool_calls_go_to_the_client_and_back() -> None:
    episode = episode_of(BY_NAME["qwen2.5"], CALL, "two")

    async def play() -> None:
        first = [user("one and one?")]
        said = await episode.chat(first, (ADD,))
        assert [call.name for call in said.reply.tool_calls] == ["add"]
        function = {"name": "add", "arguments": {"a": 1}}
        call = {"type": "function", "id": "c00010000", "function": function}
        answered = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "2", "tool_call_id": "c00010000"}
        await episode.chat([*first, answered, result], (ADD,))

    asyncio.run(play())
    [branch] = episode.branches
    assert [turn.role for turn in branch.turns] == ["assistant", "tool", "assistant"]
    assert "<tool_response>\n2\n</tool_response>" in episode.rules.codec.decode(
        branch.tokens.tolist()
    )
    assert episode.figures["tool_calls"] == 1 and episode.figures["tool_calls_malformed"] == 0


@pytest.mark.parametrize(
    ("config", "tokens", "reason", "said"),
    [
        ({"max_turns": 1}, 5, "turns", "has had its max_turns, 1"),
        ({}, 5000, "length", "5000 tokens leave no room for a turn"),
    ],
)
def test_limits_end_the_episode(
    config: dict[str, Any], tokens: int, reason: str, said: str
) -> None:
    episode = episode_of(BY_NAME["qwen2.5"], "a", "b", **config)

    async def play() -> None:
        await episode.sample([1, 2])
        with pytest.raises(CallRefused, match=said):
            await episode.sample(list(range(tokens)))
        episode.end()
        with pytest.raises(CallRefused, match="over"):
            await episode.sample([1])

    asyncio.run(play())
    assert episode.reason == reason


def served(episode: Episode, ask: Callable[[httpx.AsyncClient, str], Awaitable[Any]]) -> Any:
    async def play() -> Any:
        endpoint = Endpoint(ServeConfig())
        await endpoint.open()
        try:
            with endpoint.serving(episode) as key:
                async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
                    return await ask(client, key)
        finally:
            await endpoint.close()

    return asyncio.run(play())


def post(path: str, body: object, key: str | None = None) -> Callable[..., Awaitable[Any]]:
    async def ask(client: httpx.AsyncClient, own: str) -> Any:
        headers = {"Authorization": f"Bearer {key or own}"}
        sent = body if isinstance(body, str) else None
        json = None if isinstance(body, str) else body
        return await client.post(path, content=sent, json=json, headers=headers)

    return ask


def test_a_call_for_another_host_or_of_too_many_bytes_is_refused() -> None:
    async def ask(client: httpx.AsyncClient, key: str) -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {key}"}
        elsewhere = headers | {"Host": "evil.example"}
        strange = await client.post("generate", json={}, headers=elsewhere)
        return [
            strange,
            await client.post("generate", content=bytes(MOST_BYTES + 1), headers=headers),
        ]

    strange, long = served(episode_of(BY_NAME["qwen2.5"], "four"), ask)
    assert strange.status_code == 421 and "localhost" in strange.text
    assert long.status_code == 400 and "64 MiB" in long.text


def test_tokens_in_and_tokens_out() -> None:
    episode = episode_of(BY_NAME["qwen2.5"], "four")
    asked = {"prompt_token_ids": [3, 1, 2], "max_tokens": 2, "temperature": 0.5}
    found = served(episode, post("generate", asked)).json()
    assert len(found["token_ids"]) == 2 and found["logprobs"] == [-1.0, -2.0]
    assert (found["finish_reason"], found["weight_versions"]) == ("length", [4, 4])
    assert episode.branches[0].prompt.tokens.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", "{", "not valid JSON"),
        ("chat/completions", [], "a JSON object is needed"),
        ("chat/completions", {}, "messages is None"),
        ("chat/completions", {"messages": [{"content": "a"}]}, r"messages[0] is "),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is",
        ),
        ("chat/completions", {"messages": [user("a")], "n": 0}, "n is 0"),
        ("chat/completions", {"messages": [user("a")], "tools": [3]}, "tools is [3]"),
        ("chat/completions", {"messages": [user("a")], "stop": [1]}, "stop is [1]"),
        ("chat/completions", {"messages": [user("a")], "stop": 5}, "stop is 5"),
        *(
            ("chat/completions", {"messages": [user("a") | field]}, said)
            for field, said in (
                ({"tool_calls": 5}, "messages[0].tool_calls is 5"),
                ({"tool_calls": {"function": {}}}, "messages[0].tool_calls is"),
                ({"tool_calls": [{"function": {"name": [1]}}]}, "tool_calls[0].function.name is"),
                ({"tool_calls": [{"id": {}, "function": {"name": 1}}]}, "function.name is 1"),
                ({"tool_calls": [{"id": 5, "function": {"name": "a"}}]}, "tool_calls[0].id is 5"),
                ({"name": [1]}, "messages[0].name is [1]"),
                ({"content": 5}, "messages[0].content[0] is 5"),
            )
        ),
        ("chat/completions", {"messages": [user("a")], "tools": {"a": 1}}, "tools is"),
        ("chat/completions", {"messages": [user("a")], "tools": [{"function": {}}]}, "its name"),
        ("generate", {"prompt_token_ids": [1, "a"]}, "not a list of tokens"),
        ("generate", {"prompt_token_ids": [1], "max_tokens": 1.5}, "max_tokens is 1.5"),
    ],
)
def test_what_cannot_be_asked_is_reported(path: str, body: object, said: str) -> None:
    found = served(episode_of(BY_NAME["qwen2.5"], "a"), post(path, body))
    assert found.status_code == 400 and said in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "generate"])
def test_another_key_asks_nothing(path: str) -> None:
    episode = episode_of(BY_NAME["qwen2.5"], "a")
    found = served(episode, post(path, {"messages": [user("a")]}, key="episode-x"))
    assert found.status_code == 401 and episode.branches == []
