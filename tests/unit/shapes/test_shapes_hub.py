"""Names that are no local path: messages if the hub is silent, lacks them, or has them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from plimsoll.cli.command import main
from plimsoll.shapes import known_models as hub_module
from plimsoll.shapes.known_models import RepositoryKind, not_on_hub

Captured = pytest.CaptureFixture[str]
KINDS: tuple[RepositoryKind, ...] = ("model", "dataset")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_hub_is_reported_once_and_without_noise(
    kind: RepositoryKind, capfd: Captured
) -> None:
    reply = not_on_hub("nobody/knows", kind)
    assert reply is not None
    problem, fix = reply
    assert str(constants.HF_HUB_CACHE) in problem
    assert "(http://127.0.0.1:9)" in problem and "refused" in problem
    assert "path or name" in fix and "connect this machine" in fix
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_takes_the_call_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        reply = not_on_hub("nobody/knows", "model")
    assert reply is not None and "does not answer: " in reply[0]


@pytest.mark.usefixtures("hub")
def test_offline_the_hub_is_not_asked(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reply = not_on_hub("nobody/knows", "model")
    assert reply is not None and "HF_HUB_OFFLINE" in reply[0] and "unset" in reply[1]
    assert hub.asked == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_is_asked_for_what_it_has(hub: Any, kind: RepositoryKind) -> None:
    hub.has = {"some/thing"}
    assert not_on_hub("some/thing", kind) is None
    reply = not_on_hub("some/thin", kind)
    assert reply is not None and f"shows no {kind} of this name" in reply[0]
    assert "hf auth login" in reply[1]
    assert hub.asked == ["some/thing", "some/thin"]
    hub.trouble = 503  # which readers wait out
    assert not_on_hub("some/thin", kind) is None
    assert not_on_hub("no..name", kind) is not None


@pytest.mark.usefixtures("no_hub")
def test_the_hub_is_not_asked_for_files_in_the_cache() -> None:
    cached = Path(constants.HF_HUB_CACHE) / "models--some--model" / "snapshots" / "0123"
    prepared = Path(constants.HF_HOME) / "datasets" / "some___rows" / "default"
    for folder in (cached, prepared):
        folder.mkdir(parents=True)
    assert not_on_hub("some/model", "model") is None
    assert not_on_hub("some/rows", "dataset") is None
    assert not_on_hub("some/rows", "model") is not None


@pytest.mark.usefixtures("no_hub")
def test_paths_and_names_that_are_nearly_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "policy").mkdir(parents=True)
    for given, near in (
        ("mdels/polcy", "models/policy"),
        ("Qwen/Qwen2.5-0.5B-Instrct", "Qwen/Qwen2.5-0.5B-Instruct or "),
    ):
        reply = not_on_hub(given, "model")
        assert reply is not None and f"(did you mean {near}" in reply[1]
    right = not_on_hub("Qwen/Qwen2.5-0.5B-Instruct", "model")
    assert right is not None and "did you mean" not in right[1]


@pytest.mark.usefixtures("no_hub")
def test_every_command_looks_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    Path("run/checkpoints/step-000001").mkdir(parents=True)
    Path("run/checkpoints/step-000001/state.json").touch()
    text = (
        "# dpo\nrun: {directory: run, steps: 1}\n"
        "data: {train: {path: some/rows, chosen: a, rejected: b},"
        " eval: {path: some/rows, chosen: a, rejected: b}}\n"
        "actor: {model: {path: some/model}}\nbatch: {pairs: 1, micro_batch_tokens: 4096}\n"
        "reference: {model: {path: other/model}}\n"
    )
    for file in ("dpo.yaml", "run/config.yaml"):
        Path(file).write_text(text)
    for words, keys in (
        (["dpo", "dpo.yaml"], ["data.train", "data.eval", "actor.model", "reference.model"]),
        (["eval", "dpo.yaml"], ["actor.model", "data.eval", "reference.model"]),
        (["eval", "dpo.yaml", "--model", "a/b"], ["--model", "data.eval", "reference.model"]),
        (["export", "run", "--to", "out"], ["actor.model"]),
        (["merge", "adapter", "--out", "out"], ["--base"]),
        (["merge", "adapter", "--out", "out", "--base", "a/b"], ["--base: a/b"]),
    ):
        assert main(words) == 2
        said = capfd.readouterr()
        assert said.out == "" and "etrying" not in said.err
        assert said.err.count("does not answer") == len(keys)
        assert all(f"\n  {key}" in said.err for key in keys)
