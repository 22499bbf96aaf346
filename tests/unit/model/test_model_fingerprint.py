"""Two models have one fingerprint if and only if they give the same log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from decided import decided_model
from safetensors.numpy import save_file

from plimsoll.train.reference import model_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for shard in (1, 2):
        save_file({"w": np.full((2, 3), shard, np.float32)}, tmp_path / f"m-{shard}.safetensors")
    return tmp_path


def test_other_files_do_not_change_the_fingerprint(model: Path) -> None:
    plain = model_fingerprint(decided_model(path=str(model), dtype="bfloat16"))
    (model / "tokenizer.json").write_text("{}")
    same = decided_model(
        path=str(model),
        dtype="bfloat16",
        head_chunk=7,
        gradient_checkpointing=True,
        double_quantization=False,
    )
    assert model_fingerprint(same) == plain
    assert len(plain) == 32


def test_weights_config_and_dtype_change_the_fingerprint(model: Path) -> None:
    config = decided_model(path=str(model), dtype="bfloat16")
    found = [model_fingerprint(config)]
    found.append(model_fingerprint(config.model_copy(update={"dtype": "float32"})))
    four_bit = config.model_copy(update={"quantization": "nf4"})
    found.append(model_fingerprint(four_bit))
    found.append(model_fingerprint(four_bit.model_copy(update={"double_quantization": False})))
    weights = np.full((2, 3), 2, np.float32)
    weights[1, 1] += 1e-6
    save_file({"w": weights}, model / "m-2.safetensors")
    found.append(model_fingerprint(config))
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "rope_theta": 1}))
    found.append(model_fingerprint(config))
    assert len(set(found)) == 6
