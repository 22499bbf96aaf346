"""All weights of a rank on a card reach an engine, and what they were packed into goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Setting, zero_stage
from ranks import RankProcesses

from plimsoll.config.rollout import DecidedRoute
from plimsoll.sync.buckets import rebuild_bucket, split_bytes, sum_pieces
from plimsoll.sync.channel import Channel, open_inlet, open_outlet
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.weights import WeightSender, plan_weights
from plimsoll.trainer.worker import Worker


def send_twice(place: Place, model: Path, route: DecidedRoute) -> tuple[int, list[int]]:
    """Return how many weights arrived as they are, and the card's bytes after each sending."""
    worker = Worker(place)
    worker.load_model("actor", Setting(zero_stage(2)).role(model), 1.0)
    engine, sender, arrived, held = worker._engines["actor"], WeightSender(), 0, []
    lm: Any = engine.module.lm
    weights = dict(lm.named_parameters(remove_duplicate=False))
    plan = plan_weights(engine, 300_000, True, False)
    outlet = open_outlet(Channel(route, plan.largest, readers=1), place.torch_device)
    channel = outlet.channel
    inlet = open_inlet(channel, 1, place.torch_device)
    for _ in range(2):
        for planned in plan.buckets:
            bucket = sender.ship(engine, planned, True, outlet)
            assert bucket is not None
            assert rebuild_bucket(inlet.next()) == bucket
            data = inlet.open(bucket.handle, bucket.bytes)
            assert sum_pieces(bucket.tensors, data) == [sent.checksum for sent in bucket.tensors]
            pieces = split_bytes(bucket.tensors, data)
            arrived += sum(torch.equal(piece, weights[name]) for name, piece in pieces.items())
            del data, pieces
            inlet.release()
        inlet.close()
        outlet.close()
        held.append(torch.cuda.memory_allocated())
    return arrived, held


@pytest.mark.parametrize("route", ["ipc", "host"])
def test_weights_arrive_and_the_memory_comes_back(
    route: DecidedRoute, tied: Path, card_rank: RankProcesses
) -> None:
    [(arrived, held)] = card_rank.run(send_twice, tied, route)
    assert arrived > 20 and held[1] <= held[0]
