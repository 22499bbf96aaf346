"""4-bit weights under ZeRO-3: between the forward and the backward no rank holds all of them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from engine_cases import VOCAB, Setting, make_batch, sft_step, zero_stage
from ranks import RankProcesses

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.cluster import Device
from plimsoll.config.engine import AdapterConfig
from plimsoll.model.policy import PolicyModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import ZeroConfig
from plimsoll.trainer.zero.settings import zero_settings
from traced_bytes import LiveBytes

_NOTHING_STAYS = {
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}


def held_after_the_decoder(place: Place, model: Path) -> tuple[int, int]:
    """Bytes that a forward left, with every layer checkpointed; and parameters in 4 bits."""

    def settings(zero: ZeroConfig, device: Device, ranks: int) -> dict[str, object]:
        return zero_settings(zero, device, ranks) | _NOTHING_STAYS

    setting = Setting(
        zero_stage(3),
        dtype="bfloat16",
        checkpointing=True,
        adapter=AdapterConfig(rank=4),
        quantization="nf4",
    )
    worker = Worker(place)
    with patch("plimsoll.trainer.zero.settings.zero_settings", settings):
        worker.load_model("actor", setting.role(model), temperature=1.0)
    policy = worker._engine("actor").module
    assert isinstance(policy, PolicyModel)
    lm = policy.lm
    held: list[int] = []
    with LiveBytes() as live:
        hook = lm.get_decoder().register_forward_hook(lambda *_: held.append(live.now))
        sft_step(worker, place, make_batch((20, 30, 20, 30), 1), 100, 1e-3)
        hook.remove()
    coded = (p for p in lm.parameters() if hasattr(p, "quant_state"))
    return held[0], sum(p.quant_state.shape.numel() for p in coded)


def test_gathered_codes_do_not_stay_until_the_backward(
    tmp_path: Path, two_ranks: RankProcesses
) -> None:
    config = tiny_config("qwen2", True, vocab=VOCAB, hidden=256, feed_forward=768, layers=4)
    write_tiny_model(tmp_path, config, seed=0, tokenizer=make_tokenizer())
    for held, quantized in two_ranks.run(held_after_the_decoder, tmp_path):
        assert 0 < held < quantized / 2 / 4
