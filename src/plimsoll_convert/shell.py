"""Find the commands of a shell script by running it in the sandbox, where there are none of them.

bash runs the script with its loops and branches. The sandbox has no file of this machine, and no
program but a few that take texts apart. Whatever else is called is written down and does nothing.
A text that only such a program or a variable could give stays as it is, such as `$(hostname...)`,
and is reported.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from signal import SIGKILL, SIGXCPU
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory

from plimsoll.errors import ConfigError
from plimsoll.process.bubblewrap import Bubblewrap
from plimsoll.process.programs import Sums, find_sandbox, hold

_REMEDY = "Give the command itself after `--`."
_SECONDS = 5
"""CPU time of a script."""
_MOST_SECONDS = 300
_KILLED = (-SIGKILL, 128 + SIGKILL, 128 + SIGXCPU)
"""Exit codes of a sandbox that was killed, or whose bash was."""
_MEMORY_BYTES, _PROCESSES = 512 * 2**20, 100
_BYTES = 16 * 2**20
"""The size of the file system that a script may write to."""
_TOOLS = "basename cat cut dirname head mkdir readlink realpath sed seq tr"
"""The programs of the sandbox: they make texts of texts, and folders for logs."""
_PRELUDE = rf"""
read -r
exec < /dev/null
ulimit -t {_SECONDS} -v 500000 -u {_PROCESSES}
set -T
trap '' PIPE
exit() {{ :; }}
exec() {{ [ $# = 0 ] || "$@"; }}
command_not_found_handle() {{
  local cards=${{CUDA_VISIBLE_DEVICES:+CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES}}
  printf '%s\0' "$PLIMSOLL_LINE" "$(($# + 1))" "$cards" "$@" >> /found/words
  printf '$(%s...)' "$1"
  while [ $# -gt 2 ]; do
    case "$1 $2" in
      "bash -c" | "bash -lc" | "sh -c" | "sh -lc" | */bash" -c" | */bash" -lc") eval "$3"; return ;;
    esac
    shift
  done
}}
trap '[ "${{FUNCNAME-}}" ] || PLIMSOLL_LINE=$LINENO; set +eux; PATH=/tools; FIXED' DEBUG
"""
"""What bash reads before the script. It waits for a line, until it is watched. Before each command
it is told again what a script may not change; so that a script is read to its end, nothing ends it
early."""
_LAUNCHERS = r"python3?(?:\.\d+)?|torchrun|deepspeed|accelerate|ray|trl"
_BY_PATH = re.compile(rf"(?m)(^\s*|[\s;&|(])[^\s'\"=;&|()]*/({_LAUNCHERS})(?=\s)")
_NAME = r"[A-Za-z_]\w*"
_USED = re.compile(rf"\$\{{?({_NAME}|[1-9])")
_SET = re.compile(
    rf"(?<![\w.$/-])({_NAME})(?:\[\w*\])?\+?=|(?:for|read|local|export|declare|mapfile)\s[^\n;]*?\b({_NAME})"
    rf"|\$\{{({_NAME}|[1-9]):?[-=+?]|(?<![\w-])-[nz]\s+[\"']?\$\{{?({_NAME}|[1-9])"
)
"""Where a variable is set, has a default, or is asked for: it may be empty."""
_NO_VALUE = re.compile(rf"(?m)^\s*#.*|({_NAME})=\"?\$\{{?\1\}}?\"?\s*$")
"""Comments, and a variable that is set to itself."""
_FAILED = re.compile(
    r": line (\d+): (.*(?:division by 0|syntax error|bad substitution|No such file).*)"
)
_KEPT = re.compile(rf"\$\((\S+?)\.\.\.\)|\$({_NAME}|[1-9])")


@dataclass(frozen=True)
class Expanded:
    """The words of one command.

    Attributes:
        line: Line of the script, from 1.
        words: The words, after expansion.
        unknown: Parts of the words that could not be expanded, each with the reason.
    """

    line: int
    words: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def script_commands(text: str, path: str, given: Mapping[str, str]) -> list[Expanded]:
    """Return the commands that a script would run, including those in `bash -c "..."`.

    Args:
        text: The script.
        path: The script's name, for messages.
        given: Values of variables, which assignments in the script do not change.

    Raises:
        ConfigError: bash cannot read the script, or there is no sandbox or no bash here.
    """
    bubblewrap, bash = find_sandbox().bubblewrap, shutil.which("bash")
    if bubblewrap is None or bash is None:
        why = "there is no bash" if bash is None else find_sandbox().trouble
        raise ConfigError(f"{path} is a script, which bash runs in a sandbox: {why} {_REMEDY}")
    text = _BY_PATH.sub(r"\1\2", text.replace("\r\n", "\n"))
    unset = _unset(text, given)
    with TemporaryDirectory() as folder:
        Path(folder, "words").touch()
        os.chmod(folder, 0o777)  # another user writes there
        os.chmod(Path(folder, "words"), 0o666)
        words = [*_sandbox(bubblewrap, folder, path, text, given, unset), bash]
        code, said = _bash([*words, "-n", path])
        if code:
            first = said.strip().splitlines()[0]
            raise ConfigError(f"{first.replace(': line ', ':', 1)}. Give a script that bash reads.")
        arguments = [given.get(n, f"${n}") for n in sorted({*unset, *given}) if n.isdigit()]
        code, said = _bash([*words, path, *arguments])
        failed = _FAILED.findall(said)
        unknown = [f"line {line}: {why}" for line, why in dict.fromkeys(failed)]
        if code in _KILLED:
            most = f"{_SECONDS} s of computing, {_PROCESSES} processes, {_MEMORY_BYTES >> 20} MiB"
            unknown.append(f"the script was ended at {most}: what comes later was not read")
        return [*_found(Path(folder, "words").read_bytes(), tuple(unknown))]


def _unset(text: str, given: Mapping[str, str]) -> list[str]:
    """Return the variables that a script uses, and that nothing sets."""
    code = _NO_VALUE.sub("", text)
    found = {name for match in _SET.findall(code) for name in match if name}
    known = {*found, *given, "BASH_SOURCE", "HOME", "PWD", "LINENO", "RANDOM", "SECONDS", "OLDPWD"}
    has_functions = re.search(r"\w\s*\(\)\s*\{", text) is not None
    return [
        name
        for name in dict.fromkeys(_USED.findall(text))
        if name not in known and not (name.isdigit() and has_functions)
    ]


def _sandbox(
    bubblewrap: Bubblewrap,
    folder: str,
    path: str,
    text: str,
    given: Mapping[str, str],
    unset: list[str],
) -> list[str]:
    """Return the words that start a program in the sandbox, with the script at its place."""
    names = {name: value for name, value in given.items() if name.isidentifier()}
    fixed = "; ".join(f"{name}={quote(value)}" for name, value in names.items())
    prelude, script = Path(folder, "prelude"), Path(folder, "script")
    prelude.write_text(_PRELUDE.replace("FIXED", fixed.replace("'", "'\\''") or ":"))
    script.write_text(text, encoding="utf-8")
    here = os.getcwd()
    variables = {"HOME": str(Path.home()), "BASH_ENV": "/found/prelude"}
    variables |= {name: f"${name}" for name in unset if not name.isdigit()} | names
    return [
        *bubblewrap.start("/", _BYTES),
        *("--bind", folder, "/found", "--dir", "/tmp", "--dir", here, "--chdir", here),
        *("--ro-bind", str(script), os.path.abspath(path)),
        *(
            word
            for tool in _TOOLS.split()
            for word in ("--symlink", f"/usr/bin/{tool}", f"/tools/{tool}")
        ),
        *(word for item in variables.items() for word in ("--setenv", *item)),
        "--",
    ]


class _Sandboxed(Popen[bytes]):
    """A sandbox that can be held to limits; killing it ends all that runs in it."""

    end = Popen.kill

    def has_ended(self) -> bool:
        return self.poll() is not None


def _bash(words: list[str]) -> tuple[int, str]:
    """Run bash until it ends; return its exit code and what it says of errors.

    There is no `sleep`, so a loop that waits for what never comes ends by its limit of CPU time.

    Raises:
        ConfigError: bash waits without computing, for longer than a busy machine explains.
    """
    variables = {"LANG": "C.UTF-8", "PATH": "/tools"}
    with _Sandboxed(words, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=variables) as process:
        hold(process, Sums(_MEMORY_BYTES, _PROCESSES), has_folder=False)
        try:
            _, said = process.communicate(b"\n", timeout=_MOST_SECONDS)
        except TimeoutExpired as error:
            process.kill()
            why = f"The script waits: it has not ended in {_MOST_SECONDS} s in the sandbox."
            raise ConfigError(f"{why} {_REMEDY}") from error
    return process.returncode, said.decode("utf-8", "replace")


def _found(written: bytes, failed: tuple[str, ...]) -> Iterator[Expanded]:
    """Yield the commands that were written down: each a line, a number of words, and these."""
    fields = iter(written.decode("utf-8", "replace").split("\0")[:-1])
    for line in fields:
        words = tuple(word for word in islice(fields, int(next(fields))) if word.strip())
        unknown = [
            f"{kept[0]}: {'a command, which is not run' if kept[1] else 'it is set nowhere before'}"
            for kept in _KEPT.finditer(" ".join(words))
        ]
        yield Expanded(int(line), words, (*dict.fromkeys(unknown), *failed))
