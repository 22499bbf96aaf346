"""A model that is loaded for a CPU uses the kernels of model/cpu; for a card it uses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_cases import CPU, SMALL, packed, settings_for, write

from plimsoll.model.attention import SDPA
from plimsoll.model.cpu import NAME, OF_PACKS
from plimsoll.model.load import load_policy, load_teacher, load_value
from plimsoll.model.tiny import tiny_config
from plimsoll.records import Sample

CARD = torch.device("cuda")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model", tiny_config("llama", True, **SMALL))


def test_every_role_on_a_cpu_has_them(path: Path) -> None:
    config = settings_for(path)
    for model in (load_policy(config, CPU), load_value(config, CPU, 0), load_teacher(config, CPU)):
        assert model.lm.config._attn_implementation == NAME
        assert _filled_rows(model.lm) == OF_PACKS
    head: Any = load_policy(config, CPU).lm.get_output_embeddings()
    assert head.form.logits.rows == load_teacher(config, CPU).form.rows == OF_PACKS


def test_a_card_has_none_of_them(path: Path) -> None:
    config = settings_for(path, attention="sdpa")
    policy = load_policy(config, CARD)  # still in host memory
    head: Any = policy.lm.get_output_embeddings()
    assert policy.lm.config._attn_implementation == SDPA
    assert _filled_rows(policy.lm) == 3 and head.form.logits.rows == 1


def _filled_rows(lm: Any) -> int:
    """Return the number of rows to which three tokens are padded."""
    pack = packed([Sample(torch.arange(3).numpy(), torch.arange(3).numpy() > 0)])
    with torch.no_grad():
        given = {"input_ids": pack.tokens_T[None], "position_ids": pack.positions_T[None]}
        output = lm.get_decoder()(**given, use_cache=False, layout=pack.layout)
    return int(output.last_hidden_state.shape[1])
