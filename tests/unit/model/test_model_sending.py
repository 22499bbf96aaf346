"""Arrays reach a device as they are, and the host does not wait for a card meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_cases import CPU
from test_model_shared_prompts import GROUPS, samples_in

from plimsoll.data.packing import pack_one
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors


def test_a_copy_is_sent() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    array.flags.writeable = False  # as Ray's store gives them
    copy = sent(array, CPU)
    assert copy.dtype == torch.int32 and copy.tolist() == array.tolist()
    copy.zero_()
    assert array[1, 2] == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_host_does_not_wait_while_it_sends_a_pack() -> None:
    samples, shared = samples_in(GROUPS)
    pack = pack_one(samples, range(len(samples)), np.array(shared))
    card = torch.device("cuda")
    torch.zeros(1, device=card)  # CUDA's own start
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = PackTensors.from_pack(pack, card)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = PackTensors.from_pack(pack, CPU)
    assert wanted.layout.keys_K is not None and found.layout.keys_K is not None
    for one, other in (
        (found.tokens_T, wanted.tokens_T),
        (found.cu_loss_tokens, wanted.cu_loss_tokens),
        (found.layout.cu_keys, wanted.layout.cu_keys),
        (found.layout.keys_K, wanted.layout.keys_K),
    ):
        assert one.is_cuda and torch.equal(one.cpu(), other)
