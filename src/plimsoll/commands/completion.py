"""Shell completion of commands, options, config keys (section by section) and their values.

At each Tab a shell's script calls `plimsoll complete WORDS...`. If that prints nothing, the shell
completes file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.config.keys import ANY, Key, below, find_key, keys_of
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import named_job
from plimsoll.resolve.job import Job

SCRIPTS: Mapping[str, str] = {
    "bash": """\
_plimsoll() {
  mapfile -t COMPREPLY < <(plimsoll complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  if [[ ${COMPREPLY[0]} == *. ]]; then compopt -o nospace; fi
}
complete -o default -F _plimsoll plimsoll""",
    "zsh": """\
_plimsoll() {
  local -a found
  found=("${(@f)$(plimsoll complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -z $found ]]; then _files; return; fi
  compadd -S '' -- ${(M)found:#*.}
  compadd -- ${found:#*.}
}
compdef _plimsoll plimsoll""",
    "fish": """\
complete -c plimsoll -a '(plimsoll complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'\
""",
}
"""The completion script for each shell."""


def candidates(
    words: Sequence[str], commands: Iterable[str], options: Callable[[str], Iterable[str]]
) -> list[str]:
    """Return the words that can complete the last word, in the order of the help.

    Args:
        words: The words after `plimsoll`; the last may be incomplete or empty.
        commands: The names of all commands.
        options: Takes a command; returns its options.
    """
    *before, last = words or [""]
    offered: Iterable[str]
    if not before:
        offered = commands
    elif before[-1] == "=":  # as bash divides --key=value
        offered = _values(before[:-1])
    elif last == "=":
        return list(_values(before))
    elif last.startswith("--") and "=" in last:
        flag = last.partition("=")[0]
        offered = [f"{flag}={value}" for value in _values([*before, flag])]
    elif last.startswith("--"):
        job = _job(before)
        offered = [*options(before[0]), *(_flags(job, last) if job else [])]
    else:
        offered = _values(before)
    return [word for word in dict.fromkeys(offered) if word.startswith(last)]


def _job(before: Sequence[str]) -> Job[Any] | None:
    """Return the job whose config keys are offered, or None.

    It is the command, the argument of `init`, or the job of a config file among the words.
    """
    for word in before[:2]:
        if word in JOBS:
            return JOBS[word]
    for path in map(Path, before):
        if path.suffix in (".yaml", ".yml") and path.is_file():
            name = named_job(path.read_text(errors="replace"))
            return None if name is None else JOBS[name]
    return None


def _flags(job: Job[Any], begun: str) -> Iterator[str]:
    """Yield the flags of all keys in the section that `begun` is in; subsections end with a dot."""
    *section, _ = begun[2:].split(".")
    for key in below(tuple(keys_of(job.config)), tuple(section)):
        if key.path[-1] != ANY:
            dot = "." if key.section else ""
            yield f"--{'.'.join([*section, key.path[-1]])}{dot}"


def _values(before: Sequence[str]) -> Iterator[str]:
    """Yield the values of the key that is the last word before; after `init`, yield the jobs."""
    job = _job(before)
    if before[-1].startswith("--") and job is not None:
        key = find_key(tuple(keys_of(job.config)), tuple(before[-1][2:].split(".")))
        yield from _choices(key)
    elif list(before) == ["init"]:
        yield from JOBS


def _choices(key: Key | None) -> Iterator[str]:
    """Yield the fixed words among the values of a key, such as `auto` of `auto | integer`."""
    if key is None:
        return
    words = key.kind.removesuffix(" or null").split(" | ")
    yield from ("true", "false") if words[0].startswith("true") else map(str, key.choices)
    if not key.choices and len(words) > 1:
        yield from (word for word in words if " " not in word and word not in _KINDS)
    if key.kind.endswith(" or null"):
        yield "null"


_KINDS = ("integer", "number", "text", "list", "mapping")
"""What a key's kind calls values of which there are many."""
