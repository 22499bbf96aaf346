"""The list of what is secret, and that nothing on it is printed or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.commands.planning import plan_job
from plimsoll.commands.report import answer_plan, plan_html
from plimsoll.config.secrets import is_secret, mask_secrets, mask_setting, mask_urls
from plimsoll.jobs.which import load_any
from plimsoll.model.tiny import tiny_config

CANARY = "cAnArY0123456789"
HOOK = f"https://chat.example.org/hooks/{CANARY}"
CONFIG = """\
# sft
run: {{directory: out, steps: 1, {notify}: "{hook}"}}
data: {{train: {{path: rows.jsonl, prompt: p, response: r}}, max_tokens: 8}}
actor: {{model: {{path: {model}}}}}
cluster: {{hardware: 1xA100-80GB}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    shape = tiny_config("qwen2", True, vocab=64, hidden=32, heads=2, feed_forward=48)
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape.to_dict()))
    return tmp_path


def write(home: Path, notify: str = "notify", hook: str = HOOK) -> str:
    path = home / "c.yaml"
    path.write_text(CONFIG.format(notify=notify, hook=hook, model=home / "model"))
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLACK_WEBHOOK_URL", "DB_PASSWORD"),
        *("--push_to_hub_token", "hub_token", "--use_wandb", "logger.wandb.key", "judge.api_key"),
        *("ray_kwargs.ray_init.runtime_env.env_vars.MY_TOKEN", "token", "client-secret"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["eos_token", "data.prompt_key", "max_tokens", "pad_token", "MONKEY", "KEYS", "tokenizer", ""],
)
def test_names_that_are_like_those_of_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        f"MY_API_KEY={CANARY} python train.py",
        f"env_vars: {{WANDB_API_KEY: {CANARY}}}",
        f'{{"HF_TOKEN": "{CANARY}"}}',
        f"client(api_key='{CANARY}')",
        f"plimsoll x --hub_token {CANARY}",
        f"plimsoll x '--run.notify={HOOK}'",
        f"plimsoll x --run.notify {HOOK} --y",
        f"{{notify: {HOOK}, steps: 1}}",
        f"https://hooks.slack.com/services/T0/B0/{CANARY}",
        f"https://user:{CANARY}@host/path",
        f"hf_{CANARY}{CANARY} is not valid",
        f"Authorization: Bearer {CANARY}",
        f"curl -H 'x-api-key: {CANARY}'",
        f"sent Bearer {CANARY}{CANARY} and was refused",
        f'{{"password": "{CANARY}"}}',
        f"options: {{api_key: {CANARY}}}",
        f"plimsoll x --api-key {CANARY}",
    ],
)
def test_secrets_in_texts_are_masked(text: str) -> None:
    masked = mask_secrets(text)
    assert CANARY not in masked and "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "judge: {url: http://127.0.0.1:8000/v1, api_key: OPENAI_API_KEY}",
        "plimsoll grpo c.yaml --rewards.a.judge.api_key OPENAI_API_KEY",
        "The variable HF_TOKEN should hold a token. Its key is a secret: see SECURITY.md.",
        "http://127.0.0.1:41111/abcdefghijklmnopqrstuv/  (Ctrl-C ends it)",
        "Header of every caller: Authorization, and in it Bearer and this: abcdefghijklmnopqrstuv",
        "run.notify: SLACK_URL  No environment variable has this name.",
    ],
)
def test_texts_without_secrets_stay(text: str) -> None:
    assert mask_secrets(text) == text


def test_values_of_variables_with_secret_names_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SERVER_TOKEN", CANARY)
    monkeypatch.setenv("OUR_SERVER_KEY", "/home/me/.ssh/key-of-mine")
    monkeypatch.setenv("OTHER", "another-long-value")
    text = "{} at /home/me/.ssh/key-of-mine with another-long-value"
    assert mask_secrets(text.format(CANARY)) == text.format("***")


def test_a_key_in_the_place_of_its_variables_name_is_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("our_key", "x")
    shown = [mask_setting(v) for v in ("OUR_KEY", "our_key", CANARY, HOOK)]
    assert shown == ["OUR_KEY", "our_key", "***", "https://chat.example.org/***"]
    assert mask_urls(f"[{HOOK}, s3://bucket/x]") == "[https://chat.example.org/***, s3://bucket/x]"


def test_a_plan_as_a_page_and_as_a_file_hides_the_webhook(home: Path) -> None:
    path = write(home)
    flags = [f"--run.notify={HOOK}?flag"]
    pages = [plan_html(path, flags, plan_job(load_any(path, flags)))]
    pages.append(json.dumps(answer_plan(path, flags, "plan", {})))
    for page in pages:
        assert CANARY not in page and "https://chat.example.org/***" in page


@pytest.mark.parametrize(
    "words",
    [
        ["--run.notfy", HOOK],
        [f"--run.notify=[{HOOK}]"],
        [f"--run.notify=[{HOOK}"],
        [f"--run={HOOK}"],
        ["--run.notify", HOOK, "--run.notify.deeper", "1"],
        ["--notify", HOOK],
        [HOOK],
    ],
)
@pytest.mark.parametrize("command", ["sft", "plan"])
def test_flags_that_are_wrong_do_not_show_a_webhook(
    command: str, words: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, write(home, hook="SLACK_URL"), *words]) == 2
    assert CANARY not in "".join(capsys.readouterr())


@pytest.mark.parametrize(("key", "hook"), [("notfy", HOOK), ("notify", f'[{HOOK}"]')])
def test_files_that_are_wrong_do_not_show_a_webhook(
    key: str, hook: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", write(home, key, hook)]) == 2
    told = capsys.readouterr().err
    assert CANARY not in told and told.startswith("error: ")


VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet "
VERL += "actor_rollout_ref.model.path=m"
TRL = "trl dpo --model_name_or_path m --dataset_name d"
OPENRLHF = "python -m openrlhf.cli.train_sft --pretrain m --dataset d --input_key q --output_key a"


@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("verl", f"{VERL} +ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={CANARY}"),
        ("verl", f"{VERL} '+ray_kwargs.ray_init.runtime_env={{env_vars: {{W: {CANARY}}}}}'"),
        ("verl", f"{VERL} trainer.hub_token={CANARY}"),
        ("trl", f"{TRL} --push_to_hub_token {CANARY}"),
        ("trl", f"{TRL} --hub_token {CANARY}"),
        ("trl", f"{TRL} --hub_token $(echo {CANARY})"),
        ("openrlhf", f"{OPENRLHF} --use_wandb {CANARY}"),
        ("openrlhf", f"{OPENRLHF} --use_wandb $(echo {CANARY})"),
        ("openrlhf", f"{OPENRLHF} --use_wandb `vault {CANARY}`"),
        ("openrlhf", f"{OPENRLHF} --wandb_api_key {CANARY}"),
    ],
)
def test_converters_show_no_keys(
    system: str, command: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "run.sh").write_text(f"{command}\n")
    main([f"from-{system}", "run.sh", "-o", "out.yaml"])
    out, err = capsys.readouterr()
    written = (home / "out.yaml").read_text() if (home / "out.yaml").exists() else ""
    assert CANARY not in out + err + written and ("***" in err or "not run" in err)
