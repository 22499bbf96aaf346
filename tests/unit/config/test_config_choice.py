"""From a Choice to a function: everything that a user can write wrongly gets its own message."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.choice import resolve_choice
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

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `rules` with one rule, and modules of a user."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("")
    (tmp_path / "rules" / "exact.py").write_text("def score(text, *, weight: float = 2.0): ...")
    (tmp_path / "rules" / "empty.py").write_text("def scored(text): ...")
    (tmp_path / "chosen.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "typo.py").write_text("scroe")
    (tmp_path / "needy.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("rules", "rules.exact", "rules.empty", "chosen"):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": True}, r"'rate' of 'chosen:score' is True \(bool\).*valid number"),
        ({"rate": "1"}, r"'rate' of 'chosen:score' is '1' \(str\).*valid number"),
        ({"rate": None}, r"'rate' of 'chosen:score' is None.*valid number"),
        ({"times": True}, r"'times' of 'chosen:score' is True \(bool\).*valid integer"),
        ({"times": 1.0}, r"'times' of 'chosen:score' is 1.0 \(float\).*valid integer"),
        ({"name": 1}, r"'name' of 'chosen:score' is 1 \(int\).*valid string"),
        ({"on": 1}, r"'on' of 'chosen:score' is 1 \(int\).*valid boolean"),
        ({"bound": 1.0}, r"'bound' of 'chosen:score' is 1.0.*greater than 1"),
        ({"kind": "c"}, r"'kind' of 'chosen:score' is 'c'.*'a' or 'b'"),
        ({"tmies": 1}, r"no option 'tmies'\. Did you mean 'times'\? Its options: rate, times"),
        ({"text": "x"}, r"no option 'text'.*keyword-only"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("chosen:score", **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", r"No rules is called 'exat'\. Did you mean 'exact'\? Known: empty, exact\."),
        ("empty", r"module rules.empty has no function 'score'\. Did you mean 'scored'\?"),
        ("chosen:scroe", r"module chosen has no function 'scroe'\. Did you mean 'score'\?"),
        ("chosen:", r"module chosen has no function ''.*It has: hidden_type, must, score\."),
        ("chosen:not_a_function", r"names a int, and a Python function is needed"),
        ("math:sqrt", r"Name one that is defined with `def`"),
        ("nowhere:score", r"cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
        ("needy:score", r"'needy:score' cannot be imported.*a_module_that_is_not_there"),
        ("broken:score", r"'broken:score' cannot be imported: SyntaxError"),
        ("typo:score", r"'typo:score' cannot be imported: NameError.*scroe"),
        (":score", r"':score' cannot be imported"),
        (".chosen:score", r"'.chosen:score' cannot be imported"),
        ("chosen:must", r"needs the option 'scale': it has no default"),
        ("chosen:hidden_type", r"type of an option cannot be read.*Size.*TYPE_CHECKING"),
    ],
)
def test_names_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_resolving_needs_no_torch() -> None:
    code = (
        "import sys; from plimsoll.config.base import Choice; "
        "from plimsoll.config.choice import resolve_choice; "
        "resolve_choice(Choice(name='textwrap:dedent'), 'rules', 'score'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
