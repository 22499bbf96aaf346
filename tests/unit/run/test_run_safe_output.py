"""What commands print is made safe in one place, whoever made the text."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from rich.text import Text

from plimsoll.cli import main
from plimsoll.records import Prompt, RewardPart, single_turn
from plimsoll.run.console import Terminal
from plimsoll.run.directory import RunDirectory
from plimsoll.run.output import safe_output, safe_streams, safe_text, tell
from plimsoll.run.trajectories import write_trajectories

SOURCE = Path(__file__).parents[3] / "src" / "plimsoll"
HOSTILE = "\x1b]0;mine\x07\x9b2J\u202eevil\u2066\u200f\r\x1b[31m"
ESCAPED = "\\x1b]0;mine\\x07\\x9b2J\\u202eevil\\u2066\\u200f\\r\\x1b[31m"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_control_codes_and_marks_of_direction_are_escaped() -> None:
    assert safe_text(f"a\tb\nü日{HOSTILE}") == f"a\tb\nü日{ESCAPED}"
    codes = [chr(i) for i in range(0xA0) if chr(i) not in "\t\n" and not " " <= chr(i) <= "~"]
    assert all(safe_text(code).isprintable() for code in [*codes, "\ud800", "\u2028", "\ufeff"])


def test_a_library_keeps_its_bar_and_loses_its_colours() -> None:
    assert safe_output("\r 50%|#") == "\r 50%|#"
    assert safe_output("\x1b[34mwandb\x1b[0m: on\r\n\x1b[A") == "wandb: on\n"
    assert safe_output("\r\x1b]0;mine\x07\r") == "\r\\x1b]0;mine\\x07\\r"


def test_what_others_print_in_the_process_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_streams():
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE, "\n"])
    shown = capsys.readouterr()
    assert shown.out == shown.err == ESCAPED.removesuffix("\\x1b[31m") + "\n"


def test_a_line_from_a_signal_handler_is_safe(capfd: pytest.CaptureFixture[str]) -> None:
    tell(HOSTILE)
    assert capfd.readouterr().err == ESCAPED + "\n"


def test_a_terminal_escapes_within_its_columns_and_draws_no_links() -> None:
    written = io.StringIO()
    terminal = Terminal(written, width=30, force_terminal=True, color_system="standard")
    table = Table(show_header=False)
    table.add_row(Text.assemble("a", (HOSTILE, "red"), "b"), "[/red]\x9b2J")
    terminal.print(table)
    terminal.print(Text("here", style="link https://evil.example"))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert not UNSAFE.search(plain) and "evil.example" not in plain and "[/red]" in plain
    assert max(map(len, plain.splitlines())) <= 30


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose sources, parts and texts are hostile."""
    prompt = Prompt(0, np.array([1], np.int32), HOSTILE, HOSTILE, HOSTILE)
    parts = (RewardPart(HOSTILE, 1.0), RewardPart("b", 1.0))
    zeros = np.zeros(1, np.float32)
    told = single_turn(prompt, 0, np.array([1]), zeros, HOSTILE, "stop", 0, parts)
    other = replace(told, sample_index=1)
    write_trajectories(RunDirectory(tmp_path).trajectories_path(1), 1, [told, other])
    return tmp_path


def test_samples_are_shown_with_their_codes_escaped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", str(run)]) == 0
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown) and f"    {ESCAPED[:40]}" in shown
    assert f"of {ESCAPED}" in shown and f"{ESCAPED} 1" in shown  # the source, and a part


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('"a\\e]0;mine\\a": 1\n"a\\e]0;mine\\a": 2\n', []),
        ('"a\\e]0;mine\\a": 1\n', []),
        ("run: {directory: x}\n", ["--run.\x1b]0;mine\x07", "1"]),
        ("run: {directory: x}\n", ["--run.steps", "\x9b2J\u202e"]),
        ("run: {directory: x}\n", ["\x1b]0;mine\x07"]),
    ],
)
def test_errors_show_names_and_values_escaped(
    config: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c\x1b[2J.yaml").write_text(config)
    assert main(["sft", str(tmp_path / "c\x1b[2J.yaml"), *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and not UNSAFE.search(shown)


def test_only_the_two_rooms_of_output_write_past_the_safe_streams() -> None:
    """`print` writes to the safe streams; rich's own console and descriptors would not."""
    past = re.compile(r"\bConsole\(file|os\.write\((?:1|2|_STANDARD_ERROR),|sys\.__std")
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if past.search(file.read_text())
    }
    assert found == {"run/output.py", "process/child.py"}
    assert "os.write(2, safe_output(" in (SOURCE / "process/child.py").read_text()
