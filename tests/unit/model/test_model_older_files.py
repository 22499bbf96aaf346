"""Saved settings in the form of transformers 4, beside that of 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.files import add_older_settings, with_older_model
from plimsoll.model.load import load_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CASES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "qwen2": (
        Qwen2Config(**SHAPE, rope_parameters=dict(DEFAULT)),
        {"rope_theta": 1e6, "rope_scaling": None},
    ),
    "llama3.1": (
        LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3)),
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ),
    "glm4": (
        Glm4Config(**SHAPE, rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}),
        {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5},
    ),
    "gemma3": (
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": dict(LINEAR),
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 1e4,
        },
    ),
    "phi3": (
        Phi3Config(
            **SHAPE,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                **FACTORS,
            },
        ),
        {
            "rope_theta": 1e4,
            "rope_scaling": {"type": "longrope", **FACTORS},
            "partial_rotary_factor": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_positions_are_in_both_forms_and_version_5_computes_the_same(
    name: str, tmp_path: Path
) -> None:
    """The older keys are those of the models' publishers; version 4.57 gave the same logits."""
    config, older = CASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    add_older_settings(tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == {**before, **older, "torch_dtype": "float32"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(60)[None] % 32
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_tokenizer_has_a_class_and_tokens_that_version_4_knows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.save_pretrained(tmp_path)
    add_older_settings(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["additional_special_tokens"] == ["<turn>"]
    assert "extra_special_tokens" not in saved
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("1+1<turn>") == tokenizer.encode("1+1<turn>")
    assert again.decode(again.encode("1<turn>"), skip_special_tokens=True) == "1"


def test_a_folder_without_settings_stays_as_it_is(tmp_path: Path) -> None:
    add_older_settings(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_byte_level_tokenizer_under_llamas_class_splits_as_its_file(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill-Llama has such a tokenizer; version 5 of transformers gives it
    SentencePiece's words."""
    file = Tokenizer(models.BPE(unk_token=None))
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"]
    )
    file.train_from_iterator(["hello world said"], trainer)
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "<s>"}
    for kind, begin in (({}, [0]), ({"add_bos_token": False}, [])):
        file.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | kind))
        words = file.encode("hello world", add_special_tokens=False).ids
        loaded = load_tokenizer(str(tmp_path))
        assert loaded.encode("hello world") == [*begin, *words]
        loaded.save_pretrained(tmp_path / "saved")
        add_older_settings(tmp_path / "saved")
        assert load_tokenizer(str(tmp_path / "saved")).encode("hello world") == [*begin, *words]


@pytest.mark.parametrize("begins", [True, False])
def test_llamas_class_says_whether_a_token_is_added_at_the_beginning(
    begins: bool, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if begins:
        token = file.id_to_token(0)
        file.post_processor = TemplateProcessing(f"{token} $A", None, [(token, 0)])
    file.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    add_older_settings(tmp_path)
    saved = json.loads(path.read_text())
    assert (saved["add_bos_token"], saved["add_eos_token"]) == (begins, False)


def test_settings_of_other_names_are_written_under_both() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    neox = with_older_model({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (neox["rotary_emb_base"], neox["rotary_pct"]) == (5e5, 1.0)
    experts = with_older_model({"model_type": "qwen3_moe", "num_local_experts": 4})
    assert experts["num_experts"] == experts["num_local_experts"] == 4
