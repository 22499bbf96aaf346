"""Messages of a run to a webhook: what it gets, what stays secret, and what a dead one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from plimsoll.commands.preflight import check_inputs
from plimsoll.config.run import RunConfig
from plimsoll.config.secrets import mask_setting
from plimsoll.errors import ConfigError, Interrupted, PlimsollError
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.run.directory import RunDirectory
from plimsoll.run.displays import StepReport
from plimsoll.run.health import HealthWatch
from plimsoll.run.progress import MetricsSink, Progress
from plimsoll.run.readings import Planned
from plimsoll.train import notify
from plimsoll.train.notify import Notify, notifying
from plimsoll.train.session import open_session


@dataclass
class Webhook:
    """A webhook of this machine, which refuses the first `refusals` messages."""

    url: str
    refusals: int = 0
    bodies: list[object] = field(default_factory=list)
    goes_on: Event = field(default_factory=Event)

    @property
    def texts(self) -> list[str]:
        return [body["text"] for body in self.bodies if isinstance(body, dict)]


@contextmanager
def serving() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            served.goes_on.wait()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refused, served.refusals = served.refusals > 0, served.refusals - 1
            if not refused:
                served.bodies.append(body)
            self.send_response(500 if refused else 200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Webhook(f"http://127.0.0.1:{server.server_port}/services/T0/B0/secret")
    served.goes_on.set()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with serving() as served:
        yield served


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_WAIT", 0.0)


def run_config(url: str) -> RunConfig:
    return RunConfig(directory="run", steps=3, notify=url)


def told(webhook: Webhook, block: Callable[[Notify], None], notes: list[str]) -> None:
    config = run_config(webhook.url)
    with suppress(PlimsollError), notifying(config, "sft runs/one", "starts", notes.append) as tell:
        block(tell)


def test_start_and_end_are_told_with_the_name_of_the_run(webhook: Webhook) -> None:
    notes: list[str] = []
    told(webhook, lambda tell: tell("halfway"), notes)
    assert [text.partition(": ")[2] for text in webhook.texts] == ["starts", "halfway", "done"]
    assert all(text.startswith("sft runs/one on ") for text in webhook.texts)
    assert webhook.bodies[0] == {"text": webhook.texts[0]}
    assert notes == []


def test_a_long_message_is_cut(webhook: Webhook) -> None:
    told(webhook, lambda tell: tell("a" * 900 + "\nthe end"), [])
    assert len(webhook.texts[1].partition(": ")[2]) == 300
    assert webhook.texts[1].endswith("a the end")


def stop(error: Exception) -> Callable[[Notify], None]:
    def stop_now(tell: Notify) -> None:
        raise error

    return stop_now


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (PlimsollError("rank 1 died\nof hunger"), "failed. rank 1 died"),
        (Interrupted("stopped after step 2, as asked"), "stopped. stopped after step 2, as asked"),
    ],
)
def test_the_end_says_how_and_why(webhook: Webhook, error: Exception, end: str) -> None:
    told(webhook, stop(error), [])
    assert webhook.texts[-1].endswith(f": {end}")


def test_a_message_that_is_refused_is_sent_again(webhook: Webhook) -> None:
    webhook.refusals = 2
    notes: list[str] = []
    told(webhook, lambda tell: None, notes)
    assert len(webhook.texts) == 2 and notes == []


def say_much(tell: Notify) -> None:
    for step in range(5):
        tell(f"step {step}")


def test_a_dead_webhook_is_noted_once_without_its_secret() -> None:
    notes: list[str] = []
    with serving() as gone:
        pass
    told(gone, say_much, notes)
    (note,) = notes
    assert "run.notify: http://127.0.0.1" in note and "***" in note and "refused" in note
    assert "secret" not in note


def test_a_webhook_that_never_answers_holds_nobody_up(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_LAST_SECONDS", 0.1)
    webhook.goes_on.clear()
    notes: list[str] = []
    told(webhook, lambda tell: tell("halfway"), notes)
    (note,) = notes
    assert "no answer" in note


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", "https://hooks.slack.com/***"),
        ("https://me:word@chat.org:8443?key=x", "https://chat.org:8443/***"),
        ("SLACK_URL", "SLACK_URL"),
    ],
)
def test_only_the_host_of_a_webhook_is_shown(url: str, masked: str) -> None:
    assert mask_setting(url) == masked == mask_setting(masked)
    assert json.loads(run_config(url).model_dump_json())["notify"] == masked


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("NO_SUCH_VARIABLE", "No environment variable"),
        ("ftp://host/secret", "begins with https"),
        ("https://hooks.slack.com/***", "secret part was left out"),
    ],
)
def test_what_names_no_webhook_is_refused_without_its_secret(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        told_config = run_config(given)
        with notifying(told_config, "sft", "starts", print):
            pass
    assert "run.notify" in str(refused.value) and "secret" not in str(refused.value).split("***")[0]


def test_a_variable_may_hold_the_url(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_WEBHOOK", webhook.url)
    with notifying(run_config("OUR_WEBHOOK"), "sft", "starts", print):
        pass
    assert len(webhook.texts) == 2


def test_a_session_tells_and_keeps_the_secret(
    model_home: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_home / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    config = {
        "run": {"directory": "run", "steps": 3, "notify": webhook.url},
        "cluster": {"where": "local"},
        "data": {"train": {"path": "rows.jsonl"}, "max_tokens": 8, "chat_template": "none"},
        "actor": {"model": {"path": "model"}},
    }
    monkeypatch.setattr("sys.argv", ["plimsoll", "sft", "c.yaml", f"--run.notify={webhook.url}"])
    with open_session(spec_of(SftConfig.model_validate(config)), Planned()):
        pass
    assert [text.partition(": ")[2] for text in webhook.texts] == ["starts", "done"]
    for name in ("config.yaml", "run.log"):
        text = (model_home / "run" / name).read_text()
        assert "***" in text and "secret" not in text


def test_an_unhealthy_figure_is_told(tmp_path: Path) -> None:
    texts: list[str] = []
    with Progress("ppo", 2, tmp_path) as progress:
        sink = MetricsSink(
            RunDirectory(tmp_path), progress, health=HealthWatch(), notify=texts.append
        )
        sink.write(StepReport(1, {"repetition": 0.9}, 1, {}, {}))
        sink.write(StepReport(2, {"repetition": 0.9}, 1, {}, {}))
    (text,) = texts
    assert text.startswith("step 1: repetition is 0.9, healthy is") and text.endswith(")")


def test_preflight_refuses_a_variable_that_is_not_set(model_home: Path) -> None:
    (model_home / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    config = {
        "run": {"directory": "run", "steps": 3, "notify": "NO_SUCH_VARIABLE"},
        "cluster": {"where": "local"},
        "data": {"train": {"path": "rows.jsonl"}, "max_tokens": 8, "chat_template": "none"},
        "actor": {"model": {"path": "model"}},
    }
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        check_inputs(spec_of(SftConfig.model_validate(config)), {})
