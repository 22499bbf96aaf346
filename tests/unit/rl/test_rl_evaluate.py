"""Held-out prompts answered: by set and by source, with pass@k and maj@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any, cast

import numpy as np
import pytest
from background_loop import LOOP
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.figures import majority, pass_at_k
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, FunctionFailed, PlimsollError, SettingsConflict
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.references import check_votes, gives_answers
from plimsoll.reward.score import OnFailure, RewardFailure, Scored
from plimsoll.rl.answers import Answering
from plimsoll.rl.evaluate import answer_held_out, evaluate, passing
from plimsoll.sampler.protocol import Request

ROWS = {"path": "x.jsonl", "prompt": "p", "reference": "a"}
ENDS = ("", "_low", "_high")


@dataclass
class PlainCluster:
    """Answers the j-th of the responses to a prompt with the j-th word of the prompt."""

    requests: list[Request] = field(default_factory=list)

    def responses_per_request(self) -> int:
        return 3

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        self.requests.append(request)
        return [
            answer(prompt, j, prompt.text.split()[j])
            for prompt in request.prompts
            for j in range(request.responses)
        ]

    def wait_for(self, future: Future[Any]) -> Any:
        return future.result()


def answer(prompt: Prompt, number: int, text: str) -> Trajectory:
    logprobs = np.zeros(1, dtype=np.float32)
    return single_turn(prompt, number, np.array([1]), logprobs, text, "stop", 0)


def config(held_out: Any, **more: Any) -> RunSpec[RlConfig]:
    found = {
        "run": {"directory": "runs/x", "steps": 2, "seed": 5},
        "data": {"train": ROWS, "eval": held_out},
        "batch": {"prompts": 4, "responses": 1},
        "actor": {"model": {"path": "m"}},
        "algorithm": {"advantage": {"name": "reinforce"}},
        "rewards": {"right": {"name": "exact_match"}, "length": {"name": "length"}},
        "eval_sampling": {"max_new_tokens": 7},
        **more,
    }
    return spec_of(RlConfig.model_validate(found))


def choosing(metric: str, **more: Any) -> dict[str, Any]:
    best = {"metric": metric, "goal": "highest", **more}
    return {"run": {"directory": "x", "steps": 1, "eval_every": 1, "best": best}}


def answering_to(key: str) -> Answering:
    """Scores at once. Right: the answer is 1. Length: 0.25 for each."""

    def submit(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
        future: Future[Scored] = Future()
        future.set_result(Scored(tuple(map(scored, trajectories)), ()))
        return future

    return Answering(LOOP, submit, print)


def scored(trajectory: Trajectory) -> Trajectory:
    right = RewardPart("right", float(trajectory.response_text == "####1"), weight=2.0)
    return replace(trajectory, rewards=(right, RewardPart("length", 0.25)))


def asked(*texts: str, source: str = "") -> list[Prompt]:
    """Return prompts whose words are the answers that will be given; `1` is right."""
    words = [" ".join(f"####{word}" for word in text.split()) for text in texts]
    return [
        Prompt(i, np.array([ord(source[:1] or " "), i]), text, source=source)
        for i, text in enumerate(words)
    ]


def figures(
    spec: RunSpec[RlConfig], cluster: PlainCluster | None = None, **sets: list[Prompt]
) -> dict[str, float]:
    """Return the figures of an evaluation whose answers are given beforehand."""
    held_out = {
        "data.eval" if name == "single" else f"data.eval.{name}": own for name, own in sets.items()
    }
    found = evaluate(cast(Cluster, cluster or PlainCluster()), spec, held_out, answering_to)
    assert all(spec.evaluation.reports(name) for name in found)
    return found


def test_one_response_of_one_set_has_the_plain_names_alone() -> None:
    spec, cluster = config(ROWS), PlainCluster()
    found = figures(spec, cluster, single=asked("1", "2", "1", "1"))
    assert found["eval/right"] == 0.75 and found["eval/reward"] == 1.75
    assert found["eval/right_low"] < 0.75 < found["eval/right_high"]
    assert {*found} == {f"eval/{n}{e}" for n in ("reward", "right", "length") for e in ENDS}
    assert {*found} == {*spec.evaluation.written_names}
    assert [r.responses for r in cluster.requests] == [1, 1]
    assert {r.sampling.max_new_tokens for r in cluster.requests} == {7}


def test_several_responses_by_hand() -> None:
    """3 responses each; right are 1, 2 and 0. pass@2: 1 - C(2,2)/C(3,2) = 2/3, 1 and 0. The most
    frequent answer is wrong (2), right (1), and of three different ones the first (3), wrong."""
    spec = config({**ROWS, "responses": 3, "sampling": {"max_new_tokens": 9}}, eval_sampling=None)
    found = figures(spec, single=asked("2 1 2", "1 2 1", "3 4 5"))
    assert found["eval/right"] == found["eval/pass@1"] == pytest.approx(3 / 9)
    assert found["eval/pass@2"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["eval/pass@3"] == pytest.approx(2 / 3)
    assert found["eval/maj@3"] == pytest.approx(1 / 3)
    assert found["eval/pass@2_low"] < found["eval/pass@2"] < found["eval/pass@2_high"]


def test_sets_have_figures_by_name_and_means_over_all_sets() -> None:
    """Each has its own responses and sampling; what is not given is of `eval_sampling`."""
    easy = {**ROWS, "responses": 2, "pass_by": "length", "pass_threshold": 0.25}
    hard = {**ROWS, "sampling": {"max_new_tokens": 900, "temperature": 0.0}}
    spec, cluster = config({"easy": easy, "hard": hard}), PlainCluster()
    found = figures(spec, cluster, easy=asked("1 1"), hard=asked("2", "1"))
    told = [found[f"eval/{name}"] for name in ("easy/right", "hard/right", "right", "reward")]
    assert told == [1, 0.5, 0.75, 1.75]
    assert (found["eval/easy/pass@2"], found["eval/hard/pass@1"]) == (1, 0.5)
    assert "eval/easy/maj@2" not in found  # a length is no answer
    assert "eval/reward_low" not in found and "eval/hard/reward_low" in found
    asked_for = [(r.responses, r.sampling.max_new_tokens) for r in cluster.requests]
    assert asked_for == [(2, 7), (1, 900)]
    longest, written = spec.longest_sequence(held_out=True)
    assert longest == spec.data.max_tokens + 900
    assert written.split(", ")[-2:] == [
        "eval_sampling.max_new_tokens = 7",
        "data.eval.hard.sampling.max_new_tokens = 900",
    ]


def test_groups_are_numbered_through_all_sets_and_rewards_hear_of_which_it_is() -> None:
    keys: list[str] = []

    def noted(key: str) -> Answering:
        keys.append(key)
        return answering_to(key)

    spec = config({"easy": {**ROWS, "responses": 2}, "hard": ROWS})
    held_out = {"data.eval.easy": asked("1 1", "2 2"), "data.eval.hard": asked("1")}
    found = answer_held_out(cast(Cluster, PlainCluster()), spec, held_out, noted)
    assert [t.group for own in found.values() for t in own] == [0, 0, 1, 1, 2]
    assert keys == ["data.eval.easy", "data.eval.hard"]


def test_a_reward_that_fails_for_held_out_prompts_stops_the_run() -> None:
    def failing(key: str) -> Answering:
        def submit(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
            on_failure(
                RewardFailure(0, 0, "right", f"The reward 'right', at row 0 of {key}", "", "")
            )
            raise AssertionError("the first failure ends the evaluation")

        return Answering(LOOP, submit, print)

    with pytest.raises(PlimsollError, match=r"at row 0 of data\.eval"):
        evaluate(cast(Cluster, PlainCluster()), config(ROWS), {"data.eval": asked("1")}, failing)


def test_sources_that_rows_name_have_figures_of_their_own() -> None:
    spec = config({**ROWS, "source": "data_source", "pass_by": "right"})
    rows = [*asked("1", "2", source="sums"), *asked("1", source="powers")]
    found = figures(spec, single=rows)
    names = ("eval/right", "eval/sums/right", "eval/powers/right", "eval/sums/pass@1")
    assert [found[name] for name in names] == [pytest.approx(2 / 3), 0.5, 1, 0.5]


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_in_which_one_passes(n: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [i < passed for i in range(n)]
    assert pass_at_k(n, passed, k) == pytest.approx(fmean(map(any, combinations(outcomes, k))))


def test_pass_at_k_by_hand() -> None:
    """1 of 4 responses passes: 1 - C(3,2)/C(4,2) = 1 - 3/6."""
    assert (pass_at_k(4, 1, 2), pass_at_k(4, 1, 1), pass_at_k(4, 1, 4)) == (0.5, 0.25, 1.0)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 4, 1)) == (0.0, 1.0)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["2", "1", "1"], 1),
        (["2", "1"], 0),  # of equally frequent ones the first
        (["2", None, "1", None, "1"], 2),
        ([None, None], None),
    ],
)
def test_the_majority_by_hand(answers: list[str | None], expected: int | None) -> None:
    assert majority(answers) == expected


def test_answers_that_are_the_same_vote_together() -> None:
    def same(one: str, other: str) -> bool:
        return float(one) == float(other)

    assert majority(["2", "2", "0.5", ".5", None, "5e-1"]) == 0
    assert majority(["2", "2", "0.5", ".5", None, "5e-1"], same) == 2
    assert majority(["2.0", "1", "2", "1.0"], same) == 0  # of equally frequent ones the first


def test_votes_of_a_set_are_counted_as_the_reward_judges() -> None:
    """Half is written in three ways; letter by letter the most frequent answer would be 2."""
    rewards = {"right": {"name": "math_answer"}}
    spec = config({**ROWS, "responses": 5}, rewards=rewards)
    [one] = spec.eval_sets
    texts = ("#### 2", "\\boxed{\\frac12}", "#### 2", "<answer>0.5</answer>", "It is 1/2.")
    prompt = Prompt(0, np.array([1]), "?", "0.5")
    found = [
        replace(answer(prompt, i, text), rewards=(RewardPart("right", float(text != "#### 2")),))
        for i, text in enumerate(texts)
    ]
    assert passing(spec.config.rewards, one, found)["maj@5"] == 1.0


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1))
def test_no_answer_is_more_frequent_than_that_of_the_majority(answers: list[str | None]) -> None:
    chosen = majority(answers)
    votes = [one for one in answers if one is not None]
    if chosen is None:
        assert not votes
        return
    assert answers[chosen] is not None and answers.index(answers[chosen]) == chosen
    assert votes.count(cast(str, answers[chosen])) == max(map(votes.count, votes))


def test_k_are_those_of_the_setting_or_powers_of_two() -> None:
    specs = [config({**ROWS, "responses": n}) for n in (2, 3, 8, 10)]
    assert [spec.eval_sets[0].ks for spec in specs] == [
        *((1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 10))
    ]


def test_a_response_passes_by_the_part_that_weighs_most() -> None:
    rewards = {name: {"name": "exact_match", "weight": w} for name, w in (("a", 0.5), ("b", 1.0))}
    assert config({**ROWS, "responses": 2}, rewards=rewards).eval_sets[0].pass_by == "b"
    rewards["a"]["weight"] = 1.0
    assert config({"x": ROWS}, rewards=rewards).eval_sets[0].pass_by == "a"


def test_a_part_without_a_scale_passes_nothing_unless_it_is_named() -> None:
    models: dict[str, Any] = {"rewards": {}, "reward_model": {"role": {"model": {"path": "r"}}}}
    [plain] = config({"a": {**ROWS, "responses": 4}}, **models).eval_sets
    assert plain.pass_by is None and not [*plain.passing]
    own = {**ROWS, "responses": 2, "pass_by": "reward_model", "pass_threshold": 0.0}
    [named] = config(own, **models).eval_sets
    assert [*named.passing] == ["pass@1", "pass@2", "maj@2"]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pass_by": "rihgt"}, {}, r"data\.eval\.pass_by: rihgt\n.*\n.*did you mean right\?"),
    ({"responses": 2, "sampling": {"temperature": 0.0}}, {"eval_sampling": None}, "all the same"),
    ({"responses": 2}, {"eval_sampling": {"temperature": 0.0}}, "eval_sampling.temperature: 0"),
    ({"sampling": {"stop": ("",)}}, {"eval_sampling": None}, r"data\.eval\.sampling\.stop"),
    ({"sampling": {}}, {}, r"eval_sampling: \{max_new_tokens: 7\}\n.*Nothing reads it"),
    (
        {"responses": 300},
        {"rollout": {"transformers": {}}},
        "works on all responses to a prompt at once",
    ),
]


@pytest.mark.parametrize(("held_out", "more", "message"), WRONG)
def test_settings_of_a_set_that_cannot_be(
    held_out: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    check_agreement(config(ROWS, **{**more, "eval_sampling": {"max_new_tokens": 7}}))
    with pytest.raises((ConfigError, SettingsConflict), match=message):
        check_agreement(config({**ROWS, **held_out}, **more))


def test_names_that_would_be_those_of_figures() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval\.a/b: given\n.*\n.*a_b"):
        check_agreement(config({"a/b": ROWS}))
    rewards = {"pass@2": {"name": "exact_match"}}
    check_agreement(config(ROWS, rewards=rewards))
    with pytest.raises(ConfigError, match=r"rewards\.pass@2"):
        check_agreement(config({**ROWS, "responses": 2}, rewards=rewards))


SETS = {"easy": {**ROWS, "responses": 4}, "hard": {**ROWS, "source": "data_source"}}


@pytest.mark.parametrize(
    "metric", ["easy/maj@4", "easy/pass@2_low", "reward", "hard/reward", "hard/openai/gsm8k/pass@1"]
)
def test_the_best_checkpoint_may_be_of_any_figure_of_any_set(metric: str) -> None:
    check_agreement(config(SETS, **choosing(f"eval/{metric}")))


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("eval/esay/maj@4", "eval/easy/maj@4"),
        ("eval/easy/pas@4", "eval/easy/pass@4"),
        ("eval/hard/maj@4", "eval/easy/maj@4"),
        ("eval/hard/sums/rewrad", "eval/hard/<source>/reward"),
        ("eval/easy/sums/reward", "eval/easy/reward"),
    ],
)
def test_another_figure_is_refused_with_the_nearest(metric: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{metric}\n.*do not report it") as told:
        check_agreement(config(SETS, **choosing(metric)))
    assert nearest in str(told.value)


def test_the_worst_checkpoint_is_not_kept_as_the_best() -> None:
    for metric in ("eval/easy/pass@4", "eval/hard/sums/pass@1"):
        with pytest.raises(SettingsConflict, match=r"run\.best\.goal: highest"):
            check_agreement(config(SETS, **choosing(metric, goal="lowest")))


def by_votes(held_out: Any, metric: str, rewards: dict[str, Any]) -> list[str]:
    spec = config(held_out, rewards=rewards, **choosing(metric))
    check_agreement(spec)
    return [str(one) for one in check_votes(spec.config.rewards, spec.eval_sets, spec.run.best)]


def test_votes_are_asked_of_rewards_that_judge_answers() -> None:
    held_out = {**ROWS, "responses": 2}
    right, code = {"r": {"name": "math_answer"}}, {"r": {"name": "code"}}
    assert not by_votes(held_out, "eval/maj@2", right)
    assert not by_votes(held_out, "eval/pass@2", code)
    [told] = by_votes(held_out, "eval/maj@2", code)
    assert "run.best.metric: eval/maj@2" in told and "rewards.r takes none" in told
    [told] = by_votes({"a": held_out, "b": held_out}, "eval/b/maj@2_low", code)
    assert "data.eval.b.pass_by" in told


def own_answer(response: str, *, letters: int = 1) -> str | None:
    if "5" in response:
        raise ZeroDivisionError("five")
    return response[-letters:]


@gives_answers(own_answer)
def own_reward(trajectory: Trajectory, *, letters: int = 1, other: int = 0) -> float:
    return 1.0


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, float]]:
    """The figures of two answers to a prompt, by a reward of one's own whose answers are the last
    two letters."""
    options = {"letters": 2, "other": 1}
    rewards = {"right": {"name": f"{__name__}:own_reward", "options": options}}
    spec = config({**ROWS, "responses": 2}, rewards={**rewards, "length": {"name": "length"}})
    return lambda text: figures(spec, single=asked(text))


def test_a_reward_of_ones_own_may_give_answers(own: Callable[[str], dict[str, float]]) -> None:
    assert own("1 1")["eval/maj@2"] == 1
    with pytest.raises(FunctionFailed, match=r"rewards\.right raised ZeroDivision"):
        own("1 5")


def test_several_sets_are_for_jobs_that_sample() -> None:
    rows = {"path": "x.jsonl", "text": "t"}
    settings: dict[str, Any] = {
        "run": {"directory": "runs/x", "steps": 2},
        "actor": {"model": {"path": "m"}},
        "data": {"train": rows, "eval": rows},
    }
    check_agreement(spec_of(SftConfig.model_validate(settings)))
    for held_out, message in (
        ({"a": rows, "b": rows}, r"data\.eval: \[a, b\]\n"),
        ({**rows, "responses": 2}, r"data\.eval\.responses: 2\n"),
    ):
        settings["data"]["eval"] = held_out
        with pytest.raises(ConfigError, match=message):
            check_agreement(spec_of(SftConfig.model_validate(settings)))
