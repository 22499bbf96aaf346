"""From a Choice to a function: everything that a user can write wrongly gets its own message."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.choice import (
    built_in_names,
    check_choice,
    positional_parameters,
    resolve_choice,
)
from plimsoll.config.rl import FUNCTIONS as FUNCTIONS_OF
from plimsoll.config.rl import PACKAGE
from plimsoll.errors import ConfigError

FUNCTIONS = """
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated, Literal
from pydantic import Field
if TYPE_CHECKING:
    from nowhere import Text, Size

def score(text: Text, *, rate: float = 1.0, times: int = 1, name: str = "", on: bool = False,
          bound: Annotated[float, Field(gt=1)] | None = None, kind: Literal["a", "b"] = "a",
          anything=None) -> Text:
    return (text, rate, times, name, on, bound, kind, anything)

def must(text, *, scale: int):
    return text * scale

def hidden_type(text, *, size: Size = 3):
    return text

async def later(text): ...

def two(text, more): ...

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `rules` with one rule, and modules of a user."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("")
    (tmp_path / "rules" / "exact.py").write_text("def score(text, *, weight: float = 2.0): ...")
    (tmp_path / "rules" / "empty.py").write_text("def scored(text): ...")
    (tmp_path / "many.py").write_text("def exact(text): ...\ndef _helper(text): ...")
    (tmp_path / "chosen.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "typo.py").write_text("scroe")
    (tmp_path / "needy.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "reading.py").write_text("open('gone.txt')")
    (tmp_path / "asking.py").write_text("import os; os.environ['A_KEY_OF_NOBODY']")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("rules", "rules.exact", "rules.empty", "chosen", "many"):
        sys.modules.pop(name, None)


def resolve(name: str, /, **options: OptionValue) -> object:
    function = resolve_choice(Choice(name=name, options=options), "rules", "score")
    return function("text")


def test_by_name_and_by_import_path() -> None:
    found = resolve_choice(Choice(name="exact", options={"weight": 3}), "rules", "score")
    assert found.func.__module__ == "rules.exact"
    assert found.keywords == {"weight": 3.0}
    assert resolve("chosen:score", rate=2, bound=1.5, kind="b", anything="x") == (
        ("text", 2.0, 1, "", False, 1.5, "b", "x")
    )
    assert resolve("chosen:must", scale=2) == "texttext"


def test_by_the_name_of_a_function_of_a_file() -> None:
    assert built_in_names("many") == ["exact"]
    assert resolve_choice(Choice(name="exact"), "many").func.__module__ == "many"
    with pytest.raises(ConfigError, match=r"No many is called '_helper'\..*Known: exact\."):
        resolve_choice(Choice(name="_helper"), "many")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": True}, r"'rate' of 'chosen:score' is True \(bool\).*valid number"),
        ({"rate": "1"}, r"'rate' of 'chosen:score' is '1' \(str\).*valid number"),
        ({"rate": None}, r"'rate' of 'chosen:score' is None.*valid number"),
        ({"times": True}, r"'times' of 'chosen:score' is True.*valid integer"),
        ({"times": 1.0}, r"'times' of 'chosen:score' is 1.0.*valid integer"),
        ({"name": 1}, r"'name' of 'chosen:score' is 1 \(int\).*valid string"),
        ({"on": 1}, r"'on' of 'chosen:score' is 1 \(int\).*valid boolean"),
        ({"bound": 1.0}, r"'bound' of 'chosen:score' is 1.0.*greater than 1"),
        ({"kind": "c"}, r"'kind' of 'chosen:score' is 'c'.*'a' or 'b'"),
        ({"tmies": 1}, r"Did you mean 'times'\? .*: rate, times"),
        ({"text": "x"}, r"no option 'text'.*keyword-only"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("chosen:score", **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", r"Did you mean 'exact'\? Known: exact\."),
        ("empty", r"called 'empty'\. Known: exact\."),
        ("chosen:scroe", r"chosen has no 'scroe'.*mean 'score'\?"),
        (
            "chosen:",
            r"chosen has no ''.*hidden_type, later, must, score, two\.",
        ),
        ("chosen:not_a_function", r"names a int"),
        ("chosen:later", r"'chosen:later' is an `async def`.*plain `def`"),
        (
            "chosen:two",
            r"missing a required argument: 'more'.*take 1 positional",
        ),
        ("math:sqrt", r"Name one that is defined with `def`"),
        ("nowhere:score", r"cannot be imported: ModuleNotFoundError.*PYTHONPATH.*file\.py:score"),
        ("chosn.py:score", r"'chosn\.py'.*mean 'chosen\.py'\?"),
        (
            "chosen.py:scroe",
            r"chosen\.py has no 'scroe'.*mean 'score'",
        ),
        ("chosen.py:later", r"'chosen\.py:later' is an `async def`"),
        ("broken.py:score", r"'broken\.py'.* loaded: SyntaxError"),
        ("chosen.py", r"No rules is called 'chosen\.py'.*path/to/file\.py:my_function"),
        ("needy:score", r"'needy:score' cannot be imported.*a_module_that_is_not_there"),
        ("broken:score", r"imported: SyntaxError"),
        ("typo:score", r"imported: NameError.*scroe"),
        ("reading:score", r"imported: FileNotFoundError.*gone\.txt"),
        ("asking:score", r"KeyError: 'A_KEY_OF_NOBODY'"),
        ("leaving:score", r"imported: SystemExit: 3"),
        (":score", r"':score' cannot be imported"),
        (".chosen:score", r"'.chosen:score' cannot be imported"),
        ("chosen:must", r"needs the option 'scale'"),
        ("chosen:hidden_type", r"type of an option cannot be read.*Size.*TYPE_CHECKING"),
    ],
)
def test_names_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_by_the_path_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "mine.py"
    path.write_text("COUNT = []\ndef score(text, *, times: int = 1):\n    return text * times")
    for name in ("own/mine.py:score", "./own/mine.py:score", f"{path}:score"):
        assert resolve(name, times=2) == "texttext"
        choice = Choice(name=name, options={"times": 2.5})
        with pytest.raises(ConfigError, match=r"'times' of '.*mine\.py:score' is 2\.5"):
            check_choice(choice, "many")
    assert positional_parameters(Choice(name="own/mine.py:score"), "many") == ("text",)
    monkeypatch.chdir(tmp_path / "own")
    assert resolve("mine.py:score") == "text"
    with pytest.raises(ConfigError, match=r"no folder 'own', as seen from '.*own'"):
        resolve("own/mine.py:score")


def test_a_file_runs_once_as_a_module_does(tmp_path: Path) -> None:
    """Losses are looked up in every micro-batch."""
    (tmp_path / "told.py").write_text(
        "open('told', 'a').write('x')\ndef score(text):\n    return 'scored'"
    )
    assert [resolve("told.py:score") for _ in range(3)] == ["scored"] * 3
    assert resolve(f"{tmp_path}/told.py:score") == "scored"
    assert (tmp_path / "told").read_text() == "x"


def test_a_module_in_this_folder_is_offered_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "beside.py").write_text("def score(text): ...")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"this folder: beside\.py:score"):
        resolve("beside:score")
    assert resolve("beside.py:score") is None
    with pytest.raises(ConfigError, match=r"or path/to/file\.py:score\.$"):
        resolve("nowhere:score")


def test_files_are_checked_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text(
        "import a_module_that_is_not_there\n"
        "def heavy(text, *, share: Share, rate: float = 1.0, bound: OverOne | None = None): ..."
    )
    check_choice(Choice(name="heavy", options={"share": 0.5, "bound": 2}), "written")
    with pytest.raises(ConfigError, match=r"needs the option 'share'"):
        check_choice(Choice(name="heavy"), "written")
    wrong: list[tuple[dict[str, OptionValue], str]] = [
        ({"share": 1.5}, r"'share' of 'heavy' is 1.5 .*less than or equal to 1"),
        ({"share": 0.5, "rate": "2"}, r"'rate' of 'heavy' is '2' .*valid number"),
        ({"share": 0.5, "bound": 1.0}, r"'bound' of 'heavy' is 1.0 .*greater than 1"),
        (
            {"share": 0.5, "rat": 1},
            r"no option 'rat'\. Did you mean 'rate'\? Its options: share, r",
        ),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            check_choice(Choice(name="heavy", options=options), "written")


@pytest.mark.parametrize("package", FUNCTIONS_OF)
def test_files_of_plimsoll_are_read_as_they_are_imported(package: str) -> None:
    """The types of their options must be found in config/base.py."""
    where = f"{PACKAGE}.{package}"
    for name in built_in_names(where):
        choice = Choice(name=name)
        check_choice(choice, where)
        taken = len(positional_parameters(choice, where))
        resolve = partial(resolve_choice, arguments=taken)
        found = inspect.signature(resolve(choice, where).func).parameters
        options = [p for p in found.values() if p.kind is p.KEYWORD_ONLY]
        for option in options:
            for value in (*(-1, 0, 0.5, 1, 2.0, True, None, "a"), option.default):
                tried = Choice(name=name, options={option.name: value})
                assert _refused(check_choice, tried, where) == _refused(resolve, tried, where)


def _refused(check: Callable[..., object], *arguments: object) -> str:
    try:
        check(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


def test_resolving_needs_no_torch() -> None:
    code = (
        "import sys; from plimsoll.config.base import Choice; "
        "from plimsoll.config.choice import resolve_choice; "
        "resolve_choice(Choice(name='textwrap:dedent'), 'rules', 'score'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
