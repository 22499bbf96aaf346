"""gpt-oss as it is published, with experts in MXFP4: refused, and copied as the refusal says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packed_cases import CPU, settings_for
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from plimsoll.errors import ConfigError
from plimsoll.model.load import load_policy
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.resolve.model_files import check_codes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4-bit floats without a sign (OCP Microscaling Formats 1.0, section 5.3.3)."""


def write_published(path: Path) -> dict[str, Tensor]:
    """Write a tiny model with experts in MXFP4; return what its weights mean."""
    config = tiny_config("gpt_oss", False, hidden=64, feed_forward=64)
    write_tiny_model(path, config, seed=0, tokenizer=None, dtype=torch.bfloat16)
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])
    files: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name], means[name] = tensor, tensor.float()
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
        scales = torch.randint(120, 127, codes.shape[:-1], dtype=torch.uint8)
        files[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        files[f"{name}_scales"] = scales
        numbers = values[codes.long()] * 2.0 ** (scales.float() - 127)[..., None]
        means[name] = numbers.flatten(2).transpose(1, 2)
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (path / "config.json").write_text(json.dumps(settings))
    return means


def test_weights_in_mxfp4_are_refused_and_their_copy_is_what_they_mean(tmp_path: Path) -> None:
    published, copy = tmp_path / "published", tmp_path / "copy"
    means = write_published(published)
    (problem,) = check_codes("actor.model.path", str(published))
    assert problem.invalid and "MXFP4" in problem.why
    with pytest.raises(ConfigError, match=r"MXFP4.*dequantize=True.*save_original_format=False"):
        load_policy(settings_for(published), CPU)
    lm = AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    lm.save_pretrained(copy, save_original_format=False)
    assert not [*check_codes("actor.model.path", str(copy))]
    found = load_policy(settings_for(copy), CPU).lm.state_dict()
    assert found.keys() == means.keys()
    assert all(torch.equal(found[name], mean) for name, mean in means.items())
