"""A language model that judges responses, behind an OpenAI-compatible endpoint.

POST URL/chat/completions: https://platform.openai.com/docs/api-reference/chat; vLLM, SGLang and
others serve the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from plimsoll.config.rl import JudgeReward
from plimsoll.config.secrets import mask_setting
from plimsoll.errors import ConfigError
from plimsoll.process.patterns import PatternTooSlow, last_group
from plimsoll.process.threads import in_thread
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Broken, Failed, Given, Outcome, TimeLimit, short_repr
from plimsoll.reward.references import missing_key
from plimsoll.reward.servers.http import Replicas


@dataclass(frozen=True)
class Judge:
    """Asks for the score of one response at a time: a `RewardCall`."""

    settings: JudgeReward
    endpoint: Replicas

    @classmethod
    def of(cls, settings: JudgeReward, client: httpx.AsyncClient, limit: TimeLimit) -> Judge:
        """Return the judge of a config. `limit` says how long one request may take.

        Raises ConfigError if the environment variable of its key is not set.
        """
        url = f"{settings.url.rstrip('/')}/chat/completions"
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {_key(settings)}"}
        return cls(settings, Replicas.of(client, [url], limit, headers))

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return one outcome per trajectory; trajectories are asked about one after another."""
        return [await self._judge(trajectory) for trajectory in trajectories]

    async def _judge(self, trajectory: Trajectory) -> Outcome:
        try:
            request = self._request(trajectory)
        except (KeyError, IndexError) as error:
            said = f": the judge's prompt names {error}, and the row has no such column"
            return Broken(said, ConfigError)
        reply = await self.endpoint.post(request)
        if isinstance(reply, Failed | Broken):
            return reply
        text = _text(reply)
        if text is None:
            return Broken(f" answered {short_repr(reply)}, and a chat completion is needed")
        return await in_thread(partial(self._score, text))

    def _request(self, trajectory: Trajectory) -> dict[str, Any]:
        settings, prompt = self.settings, trajectory.prompt
        texts = {"prompt": prompt.text, "response": trajectory.response_text}
        names = {"source": prompt.source, "reference": prompt.reference or "", **prompt.columns}
        content = settings.prompt.format_map(names | texts)
        system = [] if settings.system is None else [_message("system", settings.system)]
        return {
            "model": settings.model,
            "messages": [*system, _message("user", content)],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }

    def _score(self, text: str) -> Outcome:
        """Return the last score in a judge's answer, scaled from `low`..`high` to 0..1.

        Returns Failed, so that the judge is asked again, if there is no score within the range.
        """
        settings = self.settings
        try:
            found = last_group(settings.pattern, text)
        except PatternTooSlow as error:
            return Failed(f": {error}")
        if found is None:
            return Failed(f" found no score by its pattern in {short_repr(text)}")
        try:
            score = float(found)
        except ValueError:
            return Failed(f" found no number but {found!r} in {short_repr(text)}")
        if not settings.low <= score <= settings.high:
            between = f"{settings.low:g} to {settings.high:g}"
            return Failed(f" found a score of {score:g}, outside {between}, in {short_repr(text)}")
        return Given((score - settings.low) / (settings.high - settings.low))


def _key(settings: JudgeReward) -> str:
    assert settings.api_key is not None
    if missing_key(settings):
        raise ConfigError(
            f"the environment variable {mask_setting(settings.api_key)} should hold the key of "
            f"the judge at {settings.url}, and is not set. Set it, or leave api_key out."
        )
    return os.environ[settings.api_key]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(reply: object) -> str | None:
    """Return the text of a chat completion; None if the reply has another form."""
    try:
        content = reply["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None
