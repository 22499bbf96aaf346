"""The card of host memory sees the faults that code for cards is written with.

Each test puts one fault into a copy of a module and runs the few lines that reach it.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from fakecard.control import catching_races, refusing_waits
from packed_cases import SMALL, settings_for, write
from test_model_waits import OBJECTIVES, Plain, micro_batches

from plimsoll.errors import FunctionFailed
from plimsoll.model import checkpointing, policy, sending
from plimsoll.model.load import load_policy
from plimsoll.model.tiny import tiny_config
from plimsoll.sync import channel
from plimsoll.sync.channel import expand_segments
from plimsoll.trainer import objectives
from plimsoll.trainer.zero import sleep

CARD = torch.device("cuda", 0)


def with_fault(module: ModuleType, right: str, wrong: str) -> Any:
    """Return a copy of a module in whose source one passage is replaced."""
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{module.__name__} has changed: {right!r}"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), f"faulty {module.__name__}", "exec"), vars(copy))
    return copy


def test_a_copy_of_an_array_cannot_be_pinned() -> None:
    arrays = {"tokens": np.arange(5)}
    assert sending.send(arrays, CARD)["tokens"].tolist() == [0, 1, 2, 3, 4]
    faulty = with_fault(
        sending,
        "    # `torch.tensor` cannot pin the copy of a NumPy array. "
        "A model may load under a default device.\n",
        "    return {n: torch.tensor(a, pin_memory=True).to(device) for n, a in present.items()}\n",
    )
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        faulty.send(arrays, CARD)


def races_of_inputs_on_host(module: Any) -> list[str]:
    """Move what three layers save to the host and back; return the races."""
    on_host = module.InputsOnHost()
    inputs = torch.randn(1000, device=CARD, requires_grad=True)
    with catching_races() as races:
        output = inputs
        for _ in range(3):
            with on_host.saving():
                output = (output * 2).sin()
        output.sum().backward()
    return races


def test_a_copy_that_does_not_wait_for_its_tensor_is_a_race() -> None:
    assert races_of_inputs_on_host(checkpointing) == []
    waits = "        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))\n"
    races = races_of_inputs_on_host(with_fault(checkpointing, waits, ""))
    assert any("copy_ to host on stream" in race and "without waiting" in race for race in races)


def test_a_tensor_that_goes_before_its_copy_is_done_is_a_race() -> None:
    waits = "            torch.cuda.current_stream(tensor.device).wait_event(gone)\n"
    races = races_of_inputs_on_host(with_fault(checkpointing, waits, ""))
    assert any("is freed while copy_ to host uses it" in race for race in races)


def reads_after_sleep(module: Any) -> bool:
    """Return whether a tensor's host copy holds its bytes as soon as it sleeps."""
    tensor = torch.randn(1000, device=CARD)
    before = tensor.cpu()
    copies = module.HostCopies(CARD)
    copies.put([tensor])
    return torch.equal(copies.readable(tensor), before)


def test_a_host_copy_that_is_not_there_yet_is_read_as_other_bytes() -> None:
    assert reads_after_sleep(sleep)
    waits = "        self._synchronize()  # so that the host may read the copies\n"
    assert not reads_after_sleep(with_fault(sleep, waits, ""))


def reads_what_is_shipped(module: Any) -> bool:
    """Return whether shared memory holds a bucket's bytes as soon as its handle goes out."""
    outlet = module.HostOutlet(CARD, channel.Channel("host", 1000))
    outlet.room(1000).fill_(7)
    [path] = outlet.ship()
    return bool((channel.map_file(path, 1000) == 7).all())


def test_a_bucket_that_is_named_before_it_is_there_is_read_as_other_bytes() -> None:
    assert reads_what_is_shipped(channel)
    right = "            copy.copy_(self._packed, non_blocking=True)\n"
    waits = "            torch.cuda.current_stream(self._device).synchronize()\n"
    assert not reads_what_is_shipped(with_fault(channel, right + waits, right))


def test_memory_of_growing_segments_has_no_name_for_others() -> None:
    expand_segments(True)
    try:
        assert channel.CardMemory(2**17, CARD).names
        faulty = with_fault(channel, "with fixed_segments(device):", "if True:")
        with pytest.raises(RuntimeError, match="growing segment"):
            faulty.CardMemory(2**17, CARD)
    finally:
        expand_segments(False)


def test_a_column_of_the_loss_that_stays_on_the_host_is_refused(tmp_path: Path) -> None:
    config = tiny_config("qwen2", True, **SMALL)
    engine = Plain(load_policy(settings_for(write(tmp_path, config)), CARD).to(CARD))
    objective, stream = OBJECTIVES["policy"]
    packs = micro_batches()
    streams = [stream(pack) for pack in packs]
    engine.learn(packs, objective, streams, CARD)
    right = "advantages_L=sent[ADVANTAGES],"
    faulty = with_fault(objectives, right, "advantages_L=sent[ADVANTAGES].cpu(),")
    given = {field.name: getattr(objective, field.name) for field in fields(objective)}
    with pytest.raises(FunctionFailed, match="on the same device"):
        engine.learn(packs, faulty.PolicyObjective(**given), streams, CARD)


def test_a_wait_in_a_forward_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("qwen2", True, **SMALL)
    model = load_policy(settings_for(write(tmp_path, config)), CARD).to(CARD)
    pack = policy.PackTensors.from_pack(micro_batches()[0], CARD)
    with refusing_waits():
        model(pack)
    right = "    states_L_H: Tensor = hidden_1TH[0]"
    faulty = with_fault(policy, right, "    hidden_1TH[0, 0, 0].item()\n" + right)
    monkeypatch.setattr(policy, "predictor_states", faulty.predictor_states)
    with refusing_waits(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        model(pack)
