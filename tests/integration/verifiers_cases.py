"""Environments of verifiers for tests, and whether it is set up here."""

from __future__ import annotations

import pytest

from plimsoll.interop.verifiers.venv import SETUP, python_of, venv_directory

needs_verifiers = pytest.mark.skipif(
    not python_of(venv_directory()).exists(), reason=f"verifiers is not set up: {SETUP}"
)

TASKSETS = {
    "sums": """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    '''A reply is right that ends with the sum.'''

    @vf.reward
    async def right(self, task, trace) -> float:
        if task.answer == "raises":
            raise KeyError("door")
        return float(trace.last_reply.endswith(task.answer))

    @vf.metric
    async def replies(self, trace) -> float:
        return float(trace.num_turns)

class Config(vf.TasksetConfig):
    most: int = 3

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a in range(1, self.config.most):
            for b in range(1, self.config.most):
                yield Sum(Data(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)

__all__ = ["Sums"]
""",
    "talk": """
import asyncio, os, time
import verifiers.v1 as vf
from sums import Data, Sum, Config

class Share(Sum):
    '''A reply is the better, the more of it is the answer.'''

    @vf.reward
    async def right(self, task, trace) -> float:
        return trace.last_reply.count(task.answer) / max(1, len(trace.last_reply))

class Talk(vf.Taskset[Share, Config]):
    def load(self):
        for a in range(1, self.config.most):
            yield Share(Data(prompt=f"{a}+1=", answer="2"), self.config.task)

class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    helper: vf.AgentConfig = vf.AgentConfig()
    again: int = 2

class TalkEnv(vf.Env[TalkConfig]):
    '''Asks for the same once more, again and again.'''

    async def setup(self, agents):
        agents.helper.trainable = False

    async def run(self, task, agents):
        if task.data.name == "dies":
            os._exit(3)
        if task.data.name == "hangs":
            await asyncio.sleep(600)
        if task.data.name == "blocks":
            time.sleep(600)
        if task.data.name == "helped":
            await agents.helper.run(task)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(self.config.again):
                if segment.terminated:
                    return
                segment = await interaction.turn("1+1=")

__all__ = ["Talk", "TalkEnv"]
""",
    "adding": """
import verifiers.v1 as vf
from sums import Data, Sum, Config

class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        '''Add two numbers.'''
        return a + b

class Adding(vf.Taskset[Sum, Config]):
    def load(self):
        yield Sum(Data(prompt="40+2=", answer="42", system_prompt="Add."), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]

__all__ = ["Adding"]

if __name__ == "__main__":
    Adder.run()
""",
}
"""Modules by their names: a single turn, several turns, and a tool."""
