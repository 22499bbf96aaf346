"""The price of an engine that has no price.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decided import decided_role

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.engines import folder_value
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.hardware import Card, parse_cluster
from plimsoll.resolve.roles import Role
from plimsoll.sampler.price import EngineProcess, RolloutPrice, Sampler
from plimsoll.sampler.transformers.config import SAMPLING
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.timeline.items import job_moments
from plimsoll.trainer.price import RoleWork, TrainerPrice

QWEN = read_shape("Qwen/Qwen2.5-0.5B")
SETTINGS = TrainedRole.model_validate({"model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"}})
ACTOR = Role("actor", decided_role(SETTINGS), "policy", "actor", trains="train_actor", sends=True)
MOMENTS = job_moments([ACTOR], ("rollout", "train_actor", "sync"))
TOKEN = 2 * 24 * 2 * 64 * 2  # keys and values: layers x heads x dimensions x bytes


def sampled(card: Card | None) -> dict[str, int]:
    rollout = RolloutConfig.model_validate({"transformers": {}, "dtype": "bfloat16"})
    sampler = Sampler(rollout, QWEN, longest=100, sequences=8)
    process = EngineProcess(sampler, "local", 0, "cuda", card, 0, None, MOMENTS)
    held = RolloutPrice().contents(process)
    return {one.item.name: one.item.bytes for one in held}


def test_a_sampler_holds_weights_the_longest_cache_and_logits() -> None:
    cache, logits = 8 * 100 * TOKEN * 25 // 24, 8 * QWEN.vocabulary * 10
    assert sampled(None) == {"weights": 2 * QWEN.parameters, "KV cache": cache, "logits": logits}


def test_only_the_parts_of_an_engine_hold_its_memory() -> None:
    rollout = RolloutConfig.model_validate({"vllm": {"tensor_parallel": 2}, "dtype": "bfloat16"})
    sampler, contents = Sampler(rollout, QWEN, longest=100, sequences=8), RolloutPrice().contents
    front = EngineProcess(sampler, "engine", 0, "cuda", None, 0, None, MOMENTS)
    assert [*contents(front)] == [*contents(replace(front, device="cpu"))] == []
    weights, *_ = contents(replace(front, kind="engine worker"))
    assert weights.item.bytes == QWEN.parameters


def test_a_sampler_may_say_which_share_of_its_card_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SAMPLING, "card_share", 0.5)
    [card] = parse_cluster("A100-80GB", 1, None).node.cards
    assert sampled(card) == {"share of the card": card.usable_bytes // 2}


@pytest.mark.parametrize(("dtype", "states"), [("bfloat16", 12), ("float32", 8)])
def test_a_trainer_holds_all_on_every_rank(dtype: str, states: int) -> None:
    model = {"path": "Qwen/Qwen2.5-0.5B", "dtype": dtype}
    role = decided_role(TrainedRole.model_validate({"model": model}))
    micro = MicroBatch(tokens=512, sequences=1, longest=512, loss_tokens=512)
    work = RoleWork(replace(ACTOR, settings=role), QWEN, micro, 8, "cuda", MOMENTS)
    element, price = 2 if dtype == "bfloat16" else 4, TrainerPrice()
    sizes = {t.name: t.bytes for t in price.trained(role, work, None).tensors}
    each = {"weights": element, "gradients": element, "optimizer states": states}
    assert sizes == {name: n * QWEN.parameters for name, n in each.items()}
    frozen = FrozenRole.model_validate({"model": model})
    [weights] = price.frozen(frozen, replace(work, role=replace(ACTOR, head="value")))
    assert weights.elements == QWEN.value_parameters


def test_a_file_without_a_default_must_be_there() -> None:
    assert folder_value("plimsoll.sampler.vllm", "nothing", ()) == ()
    with pytest.raises(ModuleNotFoundError):
        folder_value("plimsoll.sampler.vllm", "nothing")
