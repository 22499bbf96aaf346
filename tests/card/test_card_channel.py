"""Memory that processes share on a card comes back, whoever has died; nobody waits for copies."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Setting, zero_stage
from fakecard.control import refusing_waits
from ranks import RankProcesses
from test_sync_channel import answer, tensors_of
from test_sync_routes import role_of, rollout_of, write_model

from plimsoll.cluster.ray import RayCluster
from plimsoll.cluster.route import ActorRoute
from plimsoll.config.cluster import ClusterConfig
from plimsoll.data.packing import pack
from plimsoll.model.checkpointing import HostBlocks
from plimsoll.model.sending import keep_on_host, send
from plimsoll.records import Sample
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.sync.buckets import (
    WeightBucket,
    checksums,
    rebuild_bucket,
    ship_bucket,
    split_bytes,
)
from plimsoll.sync.channel import Channel, open_inlet, open_outlet
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.sleep import HostCopies

CARD = torch.device("cuda", 0)
BUCKET = 100_000
"""Bytes: the card shares no memory below 64 KiB, and two layers take two buckets."""


def bucket_on_card(number: int, outlet: Any) -> WeightBucket:
    return ship_bucket({n: tensor.to(CARD) for n, tensor in tensors_of(number).items()}, outlet)


def test_ranks_without_an_engine_on_their_card_keep_nothing_of_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks and one engine: nobody would open what the other rank shares."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
    model = write_model(tmp_path)
    rollout = rollout_of(TransformersConfig(), "ipc", 1).model_copy(update={"placement": "shared"})
    spec = EngineSpec(0, str(model), 64, 1, "cuda", rollout)
    cluster = RayCluster(ClusterConfig(ranks=2, device="cuda"), [spec], threads=1, device="cuda")
    try:
        cluster.all(Worker.load_model, "actor", role_of(model, 3, "q_proj"), 1.0)
        route = ActorRoute(cluster, "actor", 256, rollout)
        held = []
        for version in range(3):
            assert route.transfer(BUCKET, version) > BUCKET
            cards = [reading.card for reading in cluster.all(Worker.read_memory)]
            held.append([card.allocated for card in cards if card is not None])
    finally:
        cluster.close()
    assert len(held[0]) == 2 and held[0] == held[1] == held[2]


def die_with_memory_open(channel: Channel, connection: Any) -> None:
    inlet = open_inlet(channel, 1, CARD)
    bucket = rebuild_bucket(inlet.next())
    data = inlet.open(bucket.handle, bucket.bytes)
    connection.send(len(data))
    connection.recv()


@pytest.mark.parametrize("has_opened", [True, False])
def test_memory_comes_back_from_an_engine_that_died(has_opened: bool) -> None:
    checksums(torch.zeros(8, dtype=torch.uint8, device=CARD), [8])  # its factors stay
    torch.cuda.ipc_collect()  # what other tests shared
    before = torch.cuda.memory_allocated(CARD)
    outlet = open_outlet(Channel("ipc", BUCKET, readers=1), CARD)
    channel = outlet.channel
    bucket = bucket_on_card(1, outlet)
    if has_opened:
        context = get_context("spawn")
        near, far = context.Pipe()
        engine = context.Process(target=die_with_memory_open, args=(channel, far))
        engine.start()
        assert answer(near) == bucket.bytes
        engine.kill()
        engine.join()
    outlet.drop()
    assert torch.cuda.memory_allocated(CARD) == before


def test_an_engine_does_not_wait_for_the_copy_of_host_memory() -> None:
    """The sender fills its buffer anew only when the engine has waited, at a bucket's end."""
    outlet = open_outlet(Channel("host", BUCKET), CARD)
    channel = outlet.channel
    inlet = open_inlet(channel, 1, CARD)
    for number in range(3):
        bucket = bucket_on_card(number, outlet)
        with refusing_waits():
            data = inlet.open(bucket.handle, bucket.bytes)
        torch.cuda.current_stream(CARD).synchronize()
        for name, tensor in split_bytes(bucket.tensors, data).items():
            assert torch.equal(tensor.cpu(), tensors_of(number)[name])


def test_pinned_memory_is_on_the_host_where_a_card_is_the_default() -> None:
    weight = torch.arange(3.0, device=CARD)
    copies = HostCopies(CARD)
    with torch.device(CARD):
        assert send({"numbers": np.arange(4)}, CARD)["numbers"].tolist() == [0, 1, 2, 3]
        kept = keep_on_host(weight)
        assert HostBlocks(pin=True).take(8).is_pinned() and kept.is_pinned()
        copies.put([weight])
        copies.take_back()
    torch.cuda.synchronize(CARD)
    assert weight.tolist() == kept.tolist() == [0.0, 1.0, 2.0]


def count_ends(place: Place, model: Path) -> tuple[int, bool]:
    """Return how many ends a rank counts while it scores three micro-batches."""
    worker = Worker(place)
    worker.do("load_model", "actor", Setting(zero_stage(0)).role(model), 1.0)
    rows = [Sample(np.arange(8), np.arange(8) >= 1) for _ in range(3)]
    [packs] = pack(rows, 1, 8)
    before = worker.ends
    worker.do("log_probs", "actor", packs)
    return worker.ends - before, worker.waits_for_card


def test_a_rank_on_a_card_counts_its_micro_batches_and_calls(
    tied: Path, card_rank: RankProcesses
) -> None:
    assert card_rank.run(count_ends, tied) == [(4, True)]
