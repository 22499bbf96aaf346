"""Tell a webhook how a run goes: its start, unhealthy figures, engines that died, and its end.

`run.notify` names it. A message is one short line as `{"text": ...}`, which Slack's incoming
webhooks and many others take. A thread sends the messages, so that the run neither waits nor fails
if the webhook does not answer.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from urllib.request import Request, urlopen

from plimsoll.config.problems import Problem, invalid, refuse
from plimsoll.config.run import RunConfig
from plimsoll.config.secrets import mask_setting, mask_url
from plimsoll.errors import Interrupted
from plimsoll.machine.faults import fault_point
from plimsoll.run.responses import excerpt

Notify = Callable[[str], None]
"""Takes the text of a message, and returns at once."""

_KEY = "run.notify"
_TRIES = 3
_TIME_LIMIT = 10.0
"""Seconds for one try."""
_WAIT = 1.0
"""Seconds before the second try; they double with each try."""
_LONGEST = 300
"""Characters of a message; of a longer one its beginning and its end are sent."""
_LAST_SECONDS = 5.0
"""How long the end of a run waits for messages that are not sent yet."""


def webhook_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the reason why `run.notify` names no webhook, if it names none."""
    given = config.notify
    if given is None:
        return
    url = _url(given)
    shown, scheme = mask_setting(given), (url or "").partition("://")[0]
    if url is None:
        fix = f"Set the variable {shown} to the webhook's URL, or write the URL itself"
        yield invalid(_KEY, shown, "No environment variable has this name.", fix)
    elif scheme not in ("http", "https"):
        why = "A webhook's URL begins with https:// or http://."
        yield invalid(_KEY, shown, why, "Copy the URL from the service that shall be told")
    elif _is_masked(url):
        why = "The URL's secret part was left out when this config was written."
        fix = f"Write the URL again (--{_KEY} URL), or the name of an environment variable"
        yield invalid(_KEY, shown, why, fix)


def _url(given: str) -> str | None:
    """Return the webhook's URL; None if the environment variable that should hold it is not set."""
    return given if "://" in given else os.environ.get(given)


def _is_masked(url: str) -> bool:
    return url == mask_url(url)


@contextmanager
def notifying(config: RunConfig, name: str, begin: str, note: Notify) -> Iterator[Notify]:
    """Yield a function that sends a message about the run; send its start and its end, too.

    Args:
        config: the settings of the run; without `notify` nothing is sent.
        name: the run's name in messages.
        begin: the text of the first message.
        note: shows a line to the user: the first failure of the webhook.

    Raises:
        ConfigError: `run.notify` names no webhook.
    """
    if config.notify is None:
        yield lambda text: None
        return
    refuse(webhook_problems(config))
    url = _url(config.notify)
    assert url is not None
    sender = _Sender(url, _named(name), note)
    sender.send(begin)
    end = "done"
    try:
        yield sender.send
    except (Interrupted, KeyboardInterrupt) as error:
        end = f"stopped. {_first_line(error)}"
        raise
    except BaseException as error:
        end = f"failed. {_first_line(error)}"
        raise
    finally:
        sender.send(end)
        sender.close()


def notify_at_once(given: str, name: str, text: str) -> str:
    """Send one message, once; return a warning if the webhook does not take it, else "".

    Args:
        given: `run.notify`.
        name: the run's name.
        text: the message.
    """
    url = _url(given)
    message = f"{_named(name)}: {excerpt(text, _LONGEST)}"
    failure = "its variable is not set" if url is None else _post(url, message)
    return f"warning: {_KEY}: {mask_setting(given)} takes no message: {failure}" if failure else ""


def _named(name: str) -> str:
    return f"{name} on {socket.gethostname()}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Sender:
    """Sends messages one after another, in a thread that never ends the process.

    Consumes: the texts of `send`. Waits for: the webhook. Unblocked by: its answer, or the time
    limit of each try. Produces: nothing; the first failure is shown by the next `send` or `close`.
    Shut down by `close`, which waits a few seconds, or with the process.
    """

    def __init__(self, url: str, name: str, note: Notify) -> None:
        self._url, self._name, self._note = url, name, note
        self._failure: str | None = None
        self._has_noted = False
        self._texts: SimpleQueue[str | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def send(self, text: str) -> None:
        """Send a message later; return at once."""
        self._note_failure()
        self._texts.put(f"{self._name}: {excerpt(text, _LONGEST)}")

    def close(self) -> None:
        """Wait a few seconds for messages that are not sent yet."""
        self._texts.put(None)
        self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive() and self._failure is None:
            self._failure = f"no answer in the last {_LAST_SECONDS:.0f} s of the run"
        self._note_failure()

    def _note_failure(self) -> None:
        if self._failure is not None and not self._has_noted:
            self._has_noted = True
            self._note(
                f"warning: {_KEY}: {mask_url(self._url)} takes no messages: {self._failure}. "
                "The run goes on without them; run.log has what they say."
            )

    def _work(self) -> None:
        while (text := self._texts.get()) is not None:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(_WAIT * 2 ** (attempt - 1))
                failure = _post(self._url, text)
                if failure is None:
                    break
            else:
                self._failure = failure


def _post(url: str, text: str) -> str | None:
    """Send one message; return None, or why the webhook did not take it."""
    content = {"Content-Type": "application/json"}
    request = Request(url, json.dumps({"text": text}).encode(), content)
    try:
        fault_point("notify.send")
        with urlopen(request, timeout=_TIME_LIMIT):
            return None
    except Exception as error:  # noqa: BLE001  no message is worth a run
        return f"{type(error).__name__}: {error}".replace(url, mask_url(url))
