"""Model directories and adapters that are broken: refused by path, before they take memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import DEEP, NO_OBJECTS, each, refusal, refused_command

from plimsoll.config.engine import AdapterConfig, ModelConfig
from plimsoll.model.adapters import (
    WEIGHTS,
    adapter_bytes,
    add_adapter,
    load_adapter,
    read_adapter_config,
)
from plimsoll.model.load import load_policy, load_tokenizer
from plimsoll.model.policy import PolicyModel
from plimsoll.model.tiny import write_chat_model

CONFIG = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, prompt: q, response: a}}
actor: {model: {path: model, dtype: float32}}
cluster: {device: cpu}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is whole."""
    path = tmp_path_factory.mktemp("whole") / "model"
    write_chat_model(path, ["hello world, one two three"] * 3, 0)
    return path


@pytest.fixture
def model(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, beside a config and rows."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("rows.jsonl").write_text('{"q": "hi", "a": "yo"}\n')
    return Path(shutil.copytree(whole, "model"))


def load(path: Path) -> PolicyModel:
    config = ModelConfig(path=str(path), dtype="float32", attention="sdpa", kernels="own")
    return load_policy(config, torch.device("cpu"))


def rewrite(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(model: Path, place: str = "model") -> None:
    """The command refuses it in its dry run, or the run as it loads it."""
    refusal(lambda: (load_tokenizer(str(model)), load(model)), place)


@pytest.mark.parametrize("content", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_a_config_that_is_no_object(content: bytes, model: Path) -> None:
    (model / "config.json").write_bytes(content)
    refused_command(["sft", "c.yaml", "--dry-run"], "actor.model.path", "c.yaml:3")
    refused(model)


VALUES: list[tuple[str, object]] = [
    *each("model_type", None, 5, ["llama"], {}, "nope", "../../x"),
    *each("hidden_size", None, "x", -1, {}, 1.5),
    *each("vocab_size", None, "x", [], 7),
    *each("num_hidden_layers", None, "x", {}, 1e30),
    *each("num_attention_heads", None, "x", 0, 3),
    *each("intermediate_size", None, "x", -5, 10**9),
    *each("layer_types", "x", 5, ["evil"], []),
    *each("hidden_act", None, 5, "nope"),
    *each("rope_parameters", 5, {"rope_type": "nope"}),
    *each("attention_dropout", None, "x", {}),
    *each("bos_token_id", "x", [], {}),
    *each("max_position_embeddings", None, "x", []),
    ("quantization_config", 5),
]


@pytest.mark.parametrize(("key", "value"), VALUES, ids=range(len(VALUES)))
def test_a_value_of_a_config(key: str, value: object, model: Path) -> None:
    rewrite(model / "config.json", **{key: value})
    refused(model)


def test_code_beside_a_model_is_not_run(model: Path) -> None:
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    for kind in ("qwen2", "evil"):
        rewrite(model / "config.json", auto_map=names, model_type=kind)
        (model / "evil.py").write_text("open('opened', 'w').close()\n")
        if kind == "evil":
            refused(model)
        else:
            load(model)
    assert not Path("opened").exists()


def test_a_config_that_describes_a_far_larger_model(model: Path) -> None:
    """It would be given memory and random weights, until the kernel ends the process."""
    (model / "config.json").write_text('{"model_type": "llama"}')
    refusal(lambda: load(model), "model", "6,738,415,616 parameters")


def headers(content: bytes) -> list[bytes]:
    """A safetensors file with its header or its end damaged."""
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")

    def with_header(new: object) -> bytes:
        text = json.dumps(new).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    def changed(**values: object) -> bytes:
        return with_header(header | {name: header[name] | values})

    return [
        *(b"", content[:7], content[: 8 + size - 5], content[:-10], content + b"x" * 10, DEEP),
        *(b"\xff" * 100, (2**63).to_bytes(8, "little") + content[8:], with_header([])),
        *(changed(dtype="F7"), changed(shape=[1, 2, 3]), changed(shape=[-1]), changed(shape="x")),
        *(changed(shape=[2**40, 2**40]), changed(data_offsets=[0, 2**60])),
        *(changed(data_offsets=[5, 3]), with_header({})),
        with_header({key: value for key, value in header.items() if key != name}),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
    ]


@pytest.mark.parametrize("number", range(19))
def test_weights_that_are_damaged(number: int, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(headers(file.read_bytes())[number])
    refused(model)


INDEXES = [
    *(b"", b"[]", b"{}", DEEP, b'{"weight_map": 5}', b'{"weight_map": {"a": 5}}'),
    *(b'{"weight_map": {"a": "nope.safetensors"}}', b'{"weight_map": {"a": "/etc/passwd"}}'),
    *(b'{"weight_map": {"a": ["x"]}}', b'{"weight_map": {"a": "\\u0000"}}'),
]


@pytest.mark.parametrize("index", INDEXES, ids=range(len(INDEXES)))
def test_an_index_without_its_files(index: bytes, model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_bytes(index)
    refused_command(["sft", "c.yaml", "--dry-run"], "actor.model.path", "c.yaml:3")


def test_weights_as_pickles_are_not_opened(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch opened'\ntR.")
    refused_command(["sft", "c.yaml", "--dry-run"], "actor.model.path", "pickles")
    refused(model)
    assert not Path("opened").exists()


@pytest.mark.parametrize("content", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_no_object(name: str, content: bytes, model: Path) -> None:
    (model / name).write_bytes(content)
    refusal(lambda: load_tokenizer(str(model)), name)


PARTS: list[tuple[str, object]] = [
    *each("normalizer", 5, "x", {}),
    *each("pre_tokenizer", 5, "x", {}),
    *each("decoder", 5, "x", {}),
    *each("version", None, 5, "x"),
    *each("truncation", 5, {}),
    *each("model", 5, {}, []),
    *each("added_tokens", 5, "x", [5]),
]


@pytest.mark.parametrize(("key", "value"), PARTS, ids=range(len(PARTS)))
def test_a_part_of_a_tokenizer(key: str, value: object, model: Path) -> None:
    rewrite(model / "tokenizer.json", **{key: value})
    refusal(lambda: load_tokenizer(str(model)), "model")


@pytest.fixture(scope="module")
def saved(whole: Path) -> tuple[bytes, bytes]:
    """The files of an adapter."""
    module = load(whole)
    add_adapter(module, AdapterConfig(rank=2, targets=("all-linear",)), str(whole), 0)
    state = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return adapter_bytes(module, state)


@pytest.fixture
def adapter(saved: tuple[bytes, bytes], tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_bytes(saved[0])
    (path / WEIGHTS).write_bytes(saved[1])
    return path


@pytest.fixture
def adapt(whole: Path, adapter: Path) -> Callable[[], None]:
    return lambda: load_adapter(load(whole), read_adapter_config(adapter), adapter)


@pytest.mark.parametrize("content", [*NO_OBJECTS, b"{}", b'{"peft_type": "NOPE"}'])
def test_an_adapters_config_that_is_none(
    content: bytes, adapter: Path, adapt: Callable[[], None]
) -> None:
    (adapter / "adapter_config.json").write_bytes(content)
    refusal(adapt, "adapter")


SETTINGS: list[tuple[str, object]] = [
    *each("r", None, -1, "x", [5], 10**9, 3),
    *each("alpha_pattern", None, -1, "x", {"(": 1}),
    *each("rank_pattern", "x", {"q_proj": 10**9}, {"q_proj": "x"}),
    *each("target_modules", None, 5, ["nope"], "(", "([a-z_.0-9]+)+!"),
    *each("exclude_modules", "(", "([a-z_.0-9]+)+!"),
    *each("target_parameters", "x", [5], ["experts.down_proj"]),
    *each("bias", None, -1, "nope"),
    *each("peft_type", None, 5, "IA3"),
    *each("lora_alpha", None, "x", []),
    *(("layer_replication", [[0, 4]]), ("use_qalora", True), ("init_lora_weights", "pissa")),
]


@pytest.mark.parametrize(("key", "value"), SETTINGS, ids=range(len(SETTINGS)))
def test_a_setting_of_an_adapter(
    key: str, value: object, adapter: Path, adapt: Callable[[], None]
) -> None:
    rewrite(adapter / "adapter_config.json", **{key: value})
    refusal(adapt, "adapter")


@pytest.mark.parametrize("end", [0, 7, 200, -10])
def test_an_adapters_weights_that_are_cut(
    end: int, adapter: Path, adapt: Callable[[], None]
) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:end])
    refusal(adapt, "adapter")


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_an_adapter_without_a_file(name: str, adapter: Path, adapt: Callable[[], None]) -> None:
    (adapter / name).unlink()
    refusal(adapt, "adapter")
