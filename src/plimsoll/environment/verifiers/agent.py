"""An environment of verifiers as an agent: it plays whole episodes in its process, and each turn
that it asks for is one of the episode's session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.environment.agents.messages import (
    asked_most,
    asked_stop,
    asked_tools,
    read_messages,
    written_reply,
)
from plimsoll.environment.agents.play import Played
from plimsoll.environment.agents.session import CallRefused, Session
from plimsoll.environment.calls import EnvironmentFailed, rewarded
from plimsoll.environment.verifiers.process import Episode, VerifiersProcess
from plimsoll.errors import DataError
from plimsoll.reward.outcome import Failed

_TASK = "task"
"""The column that has a task's data, as `plimsoll verifiers-tasks` writes it."""


@dataclass(frozen=True)
class VerifiersAgent:
    """An `Agent`. seconds: for what the environment does between two turns."""

    process: VerifiersProcess
    seconds: float

    async def __call__(self, session: Session, row: Mapping[str, Any]) -> Played:
        task = row.get(_TASK)
        if not isinstance(task, Mapping):
            said = f"'s rows need a column {_TASK}, as `plimsoll verifiers-tasks` writes it"
            raise EnvironmentFailed(Failed(said))
        episode = await self.process.begin(task)
        try:
            async with asyncio.TaskGroup() as turns:
                return await self._played(episode, session, turns)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            episode.close()

    async def _played(self, episode: Episode, session: Session, turns: asyncio.TaskGroup) -> Played:
        speaking: set[asyncio.Task[None]] = set()
        hearing = asyncio.ensure_future(episode.heard())
        try:
            while True:
                seconds = None if speaking else self.seconds
                done, _ = await asyncio.wait(
                    {hearing, *speaking}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise await self._took_too_long(episode)
                speaking -= done
                if hearing not in done:
                    continue
                message = hearing.result()
                if "turn" not in message:
                    return _result(message)
                speaking.add(turns.create_task(_answer(episode, session, message)))
                hearing = asyncio.ensure_future(episode.heard())
        finally:
            hearing.cancel()

    async def _took_too_long(self, episode: Episode) -> EnvironmentFailed:
        said = f" took longer than call_seconds, which is {self.seconds:g}"
        if await episode.end_if_deaf():
            said += "; nothing moved in its process, which was ended"
        return EnvironmentFailed(Failed(said, unanswered=True))


async def _answer(episode: Episode, session: Session, message: Mapping[str, Any]) -> None:
    """Have the policy speak, or say why it does not."""
    asked, turn = message["asked"], {"turn": message["turn"]}
    try:
        messages, tools = read_messages(asked.get("messages")), asked_tools(asked)
        said = await session.chat(messages, tools, asked_most(asked), asked_stop(asked))
    except CallRefused as refused:
        episode.say({**turn, "refused": str(refused)})
    except DataError as error:
        raise EnvironmentFailed(Failed(f" asked for a turn that cannot be: {error}")) from error
    else:
        message = written_reply(said.reply)
        episode.say({**turn, "message": message, "finish_reason": said.answer.finish_reason})


def _result(message: Mapping[str, Any]) -> Played:
    """Of an episode that is over. Raises EnvironmentFailed where it has no result."""
    if "failed" in message:
        raise EnvironmentFailed(Failed(message["failed"], message.get("lines", "")))
    found = rewarded(message["reward"], "reward")
    if isinstance(found, Failed):
        raise EnvironmentFailed(found)
    return Played(found, message["figures"])
