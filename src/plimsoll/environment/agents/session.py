"""An episode that an agent plays by calls of its own, each for one turn.

Every call's tokens are kept as they were sampled. A call that begins with all the tokens of one
before goes on with its conversation: what it has behind them is what was told in between, and never
learned from. Any other begins a branch of its own (`Trajectory.earlier`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plimsoll.data.pieces import Messages, Tools
from plimsoll.environment.agents.messages import alike
from plimsoll.environment.conversation import Conversation
from plimsoll.environment.episode import Policy, Table
from plimsoll.environment.protocol import Reply
from plimsoll.environment.speech import Speech, identified, rendered
from plimsoll.environment.tool_calls import figures_of
from plimsoll.records import FinishReason, Ints, Prompt, Trajectory


class CallRefused(Exception):
    """A call of an agent's that cannot be answered; its text says why."""


@dataclass(frozen=True)
class Said:
    """A turn that a call by messages asked for. asked: the tokens that it was sampled after."""

    reply: Reply
    asked: Ints
    answer: Trajectory


@dataclass(frozen=True)
class _Chat:
    """A call by messages, as later ones look for it."""

    messages: Messages
    tools: Tools
    said: Said


class Session:
    """branches: of the episode so far, the one that was sampled last at the end. reason: why it has
    ended, once the agent has. figures: of all calls."""

    def __init__(self, table: Table, prompt: Prompt, policy: Policy) -> None:
        self.table, self.prompt, self.policy = table, prompt, policy
        self.branches: list[Conversation] = []
        self.reason: FinishReason = "stop"
        self.figures: dict[str, float] = {}
        self._turns = 0
        self._over = False
        self._chats: list[_Chat] = []

    @property
    def turns(self) -> int:
        """How often the policy was asked."""
        return self._turns

    def end(self) -> None:
        """Refuse further calls."""
        self._over = True

    async def ask(
        self, tokens: Sequence[int] | Ints, most: int | None = None, stop: Sequence[str] = ()
    ) -> Trajectory:
        """A turn after these tokens, of at most so many; it is not kept.

        Raises CallRefused where the episode is over, and where it has no turn or no room left:
        then that is why it ended.
        """
        config, longest = self.table.config, self.table.longest
        if self._over:
            raise CallRefused("The episode is over.")
        if self._turns == config.max_turns:
            self.reason = "turns"
            raise CallRefused(f"The episode has had its max_turns, {config.max_turns}.")
        if len(tokens) >= longest:
            self.reason = "length"
            raise CallRefused(
                f"{len(tokens)} tokens leave no room for a turn: data.max_tokens + "
                f"environments.{self.table.name}.max_tokens is {longest}."
            )
        self._turns += 1
        own = self.prompt.max_new_tokens or self.policy.sampling.max_new_tokens
        room = min(own, most or own, longest - len(tokens))
        asked = replace(self.prompt, tokens=np.asarray(tokens, np.int64))
        answer = await self.policy.says(asked, self._turns, room, stop)
        self._add(answer.figures)
        return answer

    async def sample(
        self, tokens: Sequence[int], most: int | None = None, stop: Sequence[str] = ()
    ) -> Trajectory:
        """A turn after these tokens, which is kept. Raises as `ask`."""
        answer = await self.ask(tokens, most, stop)
        self._keep(np.asarray(tokens, np.int64), answer, "user", None, "")
        return answer

    async def chat(
        self,
        messages: Messages,
        tools: Tools,
        most: int | None = None,
        stop: Sequence[str] = (),
    ) -> Said:
        """A turn after these messages, which is kept. tools: that it may call.

        Raises as `ask`, and DataError where the chat template refuses the messages.
        """
        speech = self.table.speech
        if self.table.config.describe_tools:
            speech = speech.knowing(tools)
        asked, told = self._asked(speech, messages, tools)
        answer = await self.ask(asked, most, stop)
        reply = identified(speech.read(answer.response_tokens, tools), self._turns)
        text = "\n".join(str(one["content"]) for one in told)
        self._keep(asked, answer, str(told[-1]["role"]), text, reply.problem or "")
        said = Said(reply, asked, answer)
        self._chats.append(_Chat(messages, tools, said))
        if tools:
            self._add(figures_of(reply))
        return said

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    def _asked(self, speech: Speech, messages: Messages, tools: Tools) -> tuple[Ints, Messages]:
        """The tokens of a conversation up to the next turn, and the messages that no call had.

        What was sampled in it is never rendered again: they go on after the longest call that it
        goes on from."""
        chats = [one for one in self._chats if _goes_on(messages, tools, one)]
        chat = max(reversed(chats), key=lambda one: len(one.messages), default=None)
        if chat is not None:
            before, said = chat.messages, messages[len(chat.messages)]
            after = messages[len(before) + 1 :]
            anew = self.table.config.rewritten == "branch"
            if not (anew and speech.is_rewritten(before, said, after)):
                sampled = chat.said.answer.response_tokens
                new = speech.continues(before, said, after, sampled)
                return np.concatenate([chat.said.asked, sampled, new]).astype(np.int64), after
        return np.array(speech.begins(messages), np.int64), messages

    def _keep(
        self, asked: Ints, answer: Trajectory, role: str, text: str | None, problem: str
    ) -> None:
        going_on = [one for one in self.branches if _begins(asked, one.all_tokens)]
        longest = max(going_on, key=lambda one: len(one.all_tokens), default=None)
        if longest is None:
            branch = Conversation(replace(self.prompt, tokens=asked))
        else:
            self.branches = [one for one in self.branches if one is not longest]
            new, branch = asked[len(longest.all_tokens) :], longest
            if len(new):
                shown = self.table.speech.text(new.tolist()) if text is None else text
                branch = branch.told(role, new, shown)
        self.branches.append(branch.said(answer, problem))
        self.reason = "length" if answer.finish_reason == "length" else "stop"


def _begins(tokens: Ints, with_these: Ints) -> bool:
    return len(tokens) >= len(with_these) and np.array_equal(tokens[: len(with_these)], with_these)


def _goes_on(messages: Messages, tools: Tools, chat: _Chat) -> bool:
    """Whether a conversation has more after what the call was answered with."""
    before = len(chat.messages)
    said: Mapping[str, Any] = rendered(chat.said.reply.message)
    return (
        len(messages) > before + 1
        and [*tools] == [*chat.tools]
        and all(map(alike, messages, (*chat.messages, said)))
    )
