"""Answers of servers, functions and judges that are no rewards, requests, and endless patterns."""

from __future__ import annotations

import asyncio
import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import DEEP, each, refusal
from starlette import testclient

from plimsoll.commands.serve_reward import TOKEN, _app, answer
from plimsoll.config.reward import HttpReward, JudgeReward, RewardConfig
from plimsoll.machine.guard import MOST_BYTES, Guard
from plimsoll.process.patterns import PatternTooSlow, is_match, last_group
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.reward.answers import final_answer, reference_answer
from plimsoll.reward.code import cases_of, program_in
from plimsoll.reward.outcome import Failed, Outcome, TimeLimit, number, numbers
from plimsoll.reward.references import check_rewards
from plimsoll.reward.score import Scored, open_rewards
from plimsoll.reward.server_forms import outcomes, vllm_outcomes
from plimsoll.reward.servers import Judge, Replicas, read_key

LIMIT = TimeLimit(5.0, "rewards.far.time_limit")
NO_NUMBERS: list[object] = [
    *(None, "1", "", [], {}, [1.0, 2.0], math.nan, math.inf, -math.inf, 10**400, 1 + 2j, b"1"),
    *(object(), float, np.array([1.0, 2.0]), np.float32("nan"), {"failed": 5}, {"rewards": 1}),
]


def trajectory(response: str, reference: str | None = None) -> Trajectory:
    tokens = np.arange(2, dtype=np.int64)
    prompt = Prompt(0, tokens, "q", reference, "", {})
    return single_turn(prompt, 0, tokens, np.zeros(2, np.float32), response, "stop", 0, group=0)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_a_value_that_is_no_reward(value: object) -> None:
    outcome = number(value)
    assert isinstance(outcome, Failed) and outcome.final and "finite number" in outcome.said
    assert len(outcome.said) < 400
    assert all(isinstance(found, Failed) for found in outcomes({"rewards": [value]}, 1))


NO_LISTS: list[object] = [
    *(None, 1.0, "ab", b"ab", {}, {"a": 1}, [], [1.0], [1.0, 2.0, 3.0], [[1.0], [2.0]], object()),
    *(np.zeros((2, 2)), np.float64(1.0), iter([1.0, 2.0]), [1.0, None], [math.nan, 1.0]),
]


@pytest.mark.parametrize("values", NO_LISTS, ids=range(len(NO_LISTS)))
def test_a_list_of_another_form(values: object) -> None:
    found = numbers(values, 2)
    assert len(found) == 2 and any(isinstance(o, Failed) and o.final for o in found)


ANSWERS: list[object] = [
    *(None, 5, "x", [], {}, [1.0, 2.0], {"rewards": None}, {"rewards": "ab"}, {"rewards": [1.0]}),
    *({"rewards": [1.0, 2.0, 3.0]}, {"rewards": {"0": 1.0}}, {"detail": "x" * 10**6}),
    *({"data": None}, {"data": []}, {"data": [1, 2]}, {"data": [{"index": 0}]}, {"data": {}}),
    *({"data": [{"index": 0, "probs": [1.0, 2.0]}] * 2}, {"data": [{"index": 0, "probs": 1.0}]}),
    *({"data": [{"index": "a", "probs": [1.0]}, {"index": 1, "probs": [1.0]}]}, {"data": "ab"}),
]


@pytest.mark.parametrize("reply", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_of_a_server(reply: object) -> None:
    for read in (outcomes, vllm_outcomes):
        found = read(reply, 2)
        assert len(found) == 2 and all(isinstance(o, Failed) and o.final for o in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rewards", "data", "index", "probs", "failed"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_answer_is_read_as_outcomes(reply: object) -> None:
    for read in (outcomes, vllm_outcomes):
        found = read(reply, 2)
        assert len(found) == 2
        assert all(math.isfinite(o) for o in found if isinstance(o, float))


BODIES = [
    *(b"", b"<html>", b"{", b"\xff\xfe", DEEP, b'{"rewards": [1.0' + b"0" * 10**6),
    b"9" * 10_000,
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_body_that_is_no_json(body: bytes, status: int) -> None:
    assert isinstance(post(httpx.Response(status, content=body)), Failed)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no"), httpx.DecodingError("no"), httpx.RemoteProtocolError("no")]
)
def test_a_server_that_does_not_answer(error: httpx.RequestError) -> None:
    found = post(error)
    assert isinstance(found, Failed) and found.unanswered


def post(reply: httpx.Response | httpx.RequestError) -> object:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(reply, httpx.Response):
            return reply
        raise reply

    async def ask() -> object:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await Replicas(client, ["http://far/score"], LIMIT).post({})

    return asyncio.run(ask())


FIELDS = [
    *each("response", None, 5),
    *each("index", [1], "x", 1e400),
    *each("group", [1]),
    *each("prompt_tokens", "x", [{}], [10**30]),
    *each("response_tokens", {"a": 1}, [None]),
]
REQUESTS: list[object] = [
    *(5, [], None, "x", {}, {"trajectories": 5}, {"trajectories": [5]}, {"query": "x"}),
    *({"query": ["a"], "prompts": [1, 2]}, {"query": ["a"], "labels": []}, {"trajectories": None}),
    *({"query": ["a"], "prompts": [5]}, {"query": ["a"], "prompts": 5}),
    *({"trajectories": [{"response": "a", key: value}]} for key, value in FIELDS),
]


def score(trajectories: Sequence[Trajectory], value: float = 1.0) -> Future[Scored]:
    done: Future[Scored] = Future()
    part = (RewardPart("r", value),)
    done.set_result(
        Scored(tuple(t.__class__(**{**vars(t), "rewards": part}) for t in trajectories), ())
    )
    return done


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_to_the_reward_server(request_: object) -> None:
    status, reply = asyncio.run(answer(score, json.dumps(request_).encode()))
    assert status == 422 and reply["detail"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_json_cannot_carry(number: float) -> None:
    def submit(trajectories: Sequence[Trajectory]) -> Future[Scored]:
        return score(trajectories, number)

    asked = json.dumps({"trajectories": [{"response": "a"}]}).encode()
    status, reply = asyncio.run(answer(submit, asked))
    assert status == 200 and f"is {number}," in reply["rewards"][0]["failed"]
    status, reply = asyncio.run(answer(submit, json.dumps({"query": ["a"]}).encode()))
    assert status == 500 and f"is {number}," in reply["detail"]


LOCAL, TOKENS = "http://127.0.0.1:8000", {"Authorization": "Bearer word"}
JSON_TYPE = {"Content-Type": "application/json"}
AS_URLS_SAY = {"Authorization": f"Basic {b64encode(b'any:word').decode()}"}
"""As `http://any:word@host` is sent, which callers write that take nothing but a URL."""


def served(host: str = "127.0.0.1", url: str = LOCAL) -> testclient.TestClient:
    return testclient.TestClient(_app({"/r": score}, Guard("word", host)), url)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *((TOKENS | {"Host": name}, 200) for name in ("localhost", "[::1]:9", "127.0.0.1:9")),
        *((TOKENS | {"Host": name}, 421) for name in ("evil.example", "127.evil.example", "", "[")),
        *((TOKENS | JSON_TYPE | {"Content-Type": t}, 415) for t in ("text/plain", "")),
        (TOKENS | {"Content-Type": "application/json; charset=utf-8"}, 200),
        (AS_URLS_SAY, 200),
        *(
            ({"Authorization": value}, 401)
            for value in ("", "Bearer", "Bearer x", "word", "Basic", "Basic eA==", "Bearer wörd")
        ),
    ],
    ids=range(18),
)
def test_who_is_answered_by_the_reward_server(headers: dict[str, str], status: int) -> None:
    given = [(name.encode(), value.encode()) for name, value in (JSON_TYPE | headers).items()]
    reply = served().post("/r", content=b'{"query": ["a"]}', headers=given)
    assert reply.status_code == status, reply.text


def test_a_server_of_the_network_is_asked_by_any_name_with_its_token_alone() -> None:
    client = served("0.0.0.0", "http://node3:8000")
    assert client.post("/r", json={"query": ["a"]}).status_code == 401
    assert client.post("/r", json={"query": ["a"]}, headers=TOKENS).status_code == 200


@pytest.mark.parametrize(("headers", "read", "status"), [({}, 0, 401), (TOKENS, MOST_BYTES, 413)])
def test_a_body_is_read_with_the_token_alone_and_not_beyond_its_bound(
    headers: dict[str, str], read: int, status: int
) -> None:
    part, taken, sent = bytes(2**20), 0, []

    async def receive() -> dict[str, object]:
        nonlocal taken
        taken += len(part)
        return {"type": "http.request", "body": part, "more_body": True}

    async def send(message: Mapping[str, object]) -> None:
        sent.append(message.get("status"))

    named = {"host": "localhost"} | JSON_TYPE | headers
    scope = {
        **{"type": "http", "method": "POST", "path": "/r", "query_string": b"", "root_path": ""},
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
    }
    asyncio.run(_app({"/r": score}, Guard("word", "127.0.0.1"))(scope, receive, send))
    assert sent[0] == status and read <= taken <= read + len(part)


def test_a_run_sends_the_token_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "word")
    assert f"Bearer {read_key(TOKEN, 'the servers')}" == TOKENS["Authorization"]


def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAR_KEY", raising=False)
    http = HttpReward(urls=("http://far",), api_key="FAR_KEY")
    [problem] = check_rewards({"far": RewardConfig(http=http)})
    assert problem.key == "rewards.far.http.api_key"
    refusal(lambda: read_key("FAR_KEY", "the servers"), "FAR_KEY")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", DEEP])
def test_a_request_that_is_no_json(body: bytes) -> None:
    status, reply = asyncio.run(answer(score, body))
    assert status == 422 and reply["detail"]


ENDLESS = [
    ("(a+)+$", "a" * 40 + "!"),
    (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 40),
    (r"(\w+\s?)*$", "word " * 20 + "!"),
]


@pytest.mark.parametrize(("pattern", "text"), ENDLESS, ids=range(len(ENDLESS)))
def test_a_pattern_without_an_end_is_ended(pattern: str, text: str) -> None:
    with pytest.raises(PatternTooSlow, match=r"regular expression .* takes more than 1 s"):
        is_match(pattern, text)
    assert last_group("([a-z])", "ab") == "b" and is_match("b", "abc")


def test_a_rule_with_such_a_pattern_fails_and_is_counted() -> None:
    config = RewardConfig(name="pattern", options={"pattern": "(a+)+$"}, retries=0)
    with open_rewards({"form": config}) as scorer:
        scored = scorer.submit([trajectory("a" * 40 + "!")]).result(60)
    assert not scored.trajectories
    assert "'form', at row 0" in str(scored.failures[0]) and "(a+)+$" in str(scored.failures[0])


def test_a_judge_with_such_a_pattern_fails() -> None:
    settings = JudgeReward(url="http://far", model="m", prompt="{response}", pattern="((a+)+)$")
    reply = {"choices": [{"message": {"content": "a" * 40 + "!"}}]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=reply))

    async def ask() -> Sequence[Outcome]:
        async with httpx.AsyncClient(transport=transport) as client:
            return await Judge(settings, client, LIMIT)([trajectory("x")])

    [outcome] = asyncio.run(ask())
    assert isinstance(outcome, Failed) and "((a+)+)$" in outcome.said


LONG = 200_000


@pytest.mark.parametrize(
    "text",
    [
        *("```" + " " * LONG, "```\n" * LONG, "<answer>" * LONG, "\\boxed{" * LONG, "$" * LONG),
        *("####" * LONG, "1" * LONG, "-" * LONG, "</answer>" * LONG, "1," * LONG, "(" * LONG),
    ],
    ids=range(11),
)
def test_a_long_response_or_reference_is_read_in_linear_time(text: str) -> None:
    """What takes the square of such a length would take minutes."""
    assert isinstance(program_in(text), str)
    final_answer(text)
    reference_answer(text)


@pytest.mark.parametrize("tests", [5, None, True, "", [], {}, [5], [{}], {"inputs": 5}])
def test_tests_of_an_unknown_form(tests: object) -> None:
    with pytest.raises(ValueError, match=r"test|object|form"):
        cases_of(tests, None)
