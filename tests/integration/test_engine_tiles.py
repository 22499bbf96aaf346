"""MLPs in tiles on two ranks that have different numbers of tiles: the weights are those without.

At stage 3 a rank that gathered weights for each tile would wait for the other one for ever.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from choice import slow
from engine_cases import Setting, make_batch, zero_stage
from engine_reference import saved_weights
from ranks import RankProcesses
from shortage_cases import train_through
from zero_cases import FORMS

from plimsoll.config.engine import AdapterConfig

SETTINGS = {
    "zero-0": Setting(zero_stage(0)),
    "zero-1": Setting(zero_stage(1), checkpointing=True),
    "zero-2-lora-nf4": Setting(
        zero_stage(2), adapter=FORMS["lora"], quantization="nf4", checkpointing="selective"
    ),
    "zero-3": Setting(zero_stage(3), checkpointing="selective"),
    "zero-3-whole": Setting(zero_stage(3, bucket_elements=150_000)),
    "zero-3-lora-nf4": Setting(zero_stage(3), adapter=FORMS["rslora nf4"], quantization="nf4"),
    "zero-3-mlps-alone": Setting(
        zero_stage(3), adapter=AdapterConfig(rank=4, targets=("down_proj",)), checkpointing=True
    ),
    "zero-3-all-cpu": Setting(
        zero_stage(3, optimizer_offload="cpu", parameter_offload="cpu"), checkpointing=True
    ),
}
BATCHES = (make_batch((90, 9, 14, 2), 1), make_batch((5, 120, 8, 3, 31), 2))
"""Of one or two sequences a rank, so that one has one pack of five tiles, and the other of two."""


@pytest.mark.parametrize(
    "name", [*[*SETTINGS][2::2], *map(slow, [*SETTINGS][::2][:1]), *map(slow, [*SETTINGS][1::2])]
)
def test_the_weights_are_those_of_whole_mlps(
    name: str, tied: Path, two_ranks: RankProcesses, tmp_path: Path
) -> None:
    setting = replace(SETTINGS[name], micro_batch_tokens=200)
    for tile in (None, 24):
        of_tiles = replace(setting, mlp_tile=tile)
        two_ranks.run(train_through, tied, of_tiles, BATCHES, (), tmp_path / str(tile))
    whole, tiled = (saved_weights(tmp_path / str(tile)) for tile in (None, 24))
    assert whole.keys() == tiled.keys()
    for weight, weight_of_tiles in zip(whole.values(), tiled.values(), strict=True):
        assert (weight - weight_of_tiles).abs().max() < 1e-5
