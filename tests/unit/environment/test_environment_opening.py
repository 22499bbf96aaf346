"""Environments by their names."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.environment.library.guess_number import GuessNumber
from plimsoll.environment.library.self_correction import SelfCorrection
from plimsoll.environment.opening import EnvironmentFactory, load_functions, open_environment
from plimsoll.environment.protocol import Message, Observation, Reply
from plimsoll.errors import ConfigError

OWN = '''
from dataclasses import dataclass

PORT = 80

@dataclass
class Native:
    depth: int = 2

    def reset(self, row):
        return f"depth {self.depth}"

    async def step(self, reply):
        return "", True

class Tools:
    def reset(self, **kwargs):
        return None

    def sound(self, line: str) -> str:
        """Sound the depth.

        Args:
            line: Of which line.
        """
        return "7"

def made(depth: int):
    return Native(depth)

def tools_made():
    return Tools()

def nothing():
    return object()

def fathoms(metres: float) -> float:
    """Metres as fathoms.

    Args:
        metres: How many.
    """
    return metres / 1.8288

class Empty: ...

class OnlyStep:
    def step(self, reply): ...

class BadTool:
    def reset(self): ...
    def sound(self, line): ...

class Idle:
    def reset(self): ...
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of one's own."""
    (tmp_path / "soundings.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "soundings", raising=False)
    return tmp_path


def factory(name: str, *functions: str) -> EnvironmentFactory:
    opened = open_environment(name, load_functions(functions))
    assert isinstance(opened, EnvironmentFactory)
    return opened


def reset(factory: EnvironmentFactory, row: dict[str, Any]) -> Observation:
    made: Any = factory.make()
    begun: Observation = asyncio.run(made.reset(row))
    return begun


def test_built_in_names() -> None:
    assert isinstance(factory("guess_number").make(high=10), GuessNumber)
    assert isinstance(factory("self_correction").make(), SelfCorrection)
    calculator = factory("calculator")
    assert [tool["function"]["name"] for tool in calculator.tools] == ["calculate"]
    begun = reset(calculator, {"prompt": "1+1?"})
    assert begun == Observation((), calculator.tools)


@pytest.mark.parametrize("place", ["soundings", "soundings.py", "./soundings.py"])
def test_by_import_path_and_by_file(place: str, own: Path) -> None:
    assert factory(f"{place}:Native").make(depth=5).reset({}) == "depth 5"
    tools = factory(f"{place}:Tools")
    assert [tool["function"]["name"] for tool in tools.tools] == ["sound"]
    made: Any = tools.make()
    step = asyncio.run(made.step(Reply("", Message("assistant", ""), (), "A problem.")))
    assert not step.done


def test_by_a_function_that_makes_one(own: Path) -> None:
    assert factory("soundings:made").make(depth=3).reset({}) == "depth 3"
    begun = reset(factory("soundings:tools_made"), {})
    assert [tool["function"]["name"] for tool in begun.tools] == ["sound"]
    with pytest.raises(ConfigError, match="object has no method `reset`"):
        factory("soundings:nothing").make()


def test_functions_beside_methods_and_alone(own: Path) -> None:
    both = factory("soundings:Tools", "soundings.py:fathoms")
    assert [tool["function"]["name"] for tool in both.tools] == ["fathoms", "sound"]
    begun = reset(both, {})
    assert begun.tools == both.tools
    alone = factory("functions", "soundings:fathoms")
    begun = reset(alone, {})
    assert begun.tools == alone.tools and len(alone.tools) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("guess_numbr", "Did you mean 'guess_number'?"),
        ("chess", "Known: calculator, command, functions, guess_number, self_correction."),
        ("functions", "Functions has no tool"),
        ("soundigns:Native", "No module named 'soundigns'"),
        ("soundings:Natve", "has no 'Natve'. Did you mean 'Native'? It has: BadTool, Empty, "),
        ("soundigns.py:Native", "Did you mean 'soundings.py'?"),
        ("elsewhere/agent.py", "there is no folder 'elsewhere'"),
        ("soundings.py", "has no class AgentExecutor"),
        ("soundings:PORT", "names a int"),
        ("soundings:Empty", "Empty has no method `reset`"),
        ("soundings:OnlyStep", "OnlyStep has no method `reset`"),
        ("soundings:Idle", "Idle has no tool"),
        ("soundings:BadTool", "BadTool.sound cannot be a tool"),
        ("broken:Native", "SyntaxError"),
        ("broken.py:Native", "SyntaxError"),
        ("leaving.py:Native", "SystemExit: 4"),
        ("agents.py:Agent", "name it alone: agents.py"),
    ],
)
def test_names_that_cannot_be_used(name: str, why: str, own: Path) -> None:
    (own / "broken.py").write_text("class Native")
    (own / "leaving.py").write_text("raise SystemExit(4)")
    (own / "agents.py").write_text("from openrlhf.utils.agent import AgentInstanceBase")
    with pytest.raises(ConfigError, match=re.escape(why)):
        open_environment(name)


def test_functions_beside_an_environment_that_carries_calls_out_itself(own: Path) -> None:
    with pytest.raises(ConfigError, match="carries out tool calls itself"):
        factory("soundings:Native", "soundings:fathoms")


def test_what_is_no_function_is_no_tool(own: Path) -> None:
    with pytest.raises(ConfigError, match="'soundings:PORT' names a int"):
        load_functions(["soundings:PORT"])
    with pytest.raises(ConfigError, match="made cannot be a tool"):
        load_functions(["soundings:made"])


def test_options_are_checked(own: Path) -> None:
    guess = factory("guess_number")
    guess.check({"low": 1, "high": 3})
    with pytest.raises(ConfigError, match=r"no option 'hihg'. Did you mean 'high'"):
        guess.check({"hihg": 3})
    with pytest.raises(ConfigError, match="missing a required argument: 'depth'"):
        factory("soundings:made").check({})
    with pytest.raises(ConfigError, match=r"no option 'depth'.* Its options: none"):
        factory("soundings:Tools").check({"depth": 1})
