"""Compares two recordings of `record.py`: `python tests/baseline/compare.py BEFORE AFTER
[--renamed FILE]`. Prints each difference; ends with code 1 where there is any.

A line of FILE is `old -> new`, and is applied to the texts and names of BEFORE.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

Renames = Sequence[tuple[str, str]]

_LONGEST_LINE = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--renamed", type=Path, help="lines of `old -> new`")
    parser.add_argument("--lines", type=int, default=40, help="of each difference (%(default)s)")
    parser.add_argument("--files", type=int, default=50, help="shown at most (%(default)s)")
    options = parser.parse_args()
    renames = _read_renames(options.renamed) if options.renamed else []
    before, after = (_read(folder) for folder in (options.before, options.after))
    before = {_renamed(name, renames): _renamed(text, renames) for name, text in before.items()}
    parts = {name.split("/")[0] for name in before} & {name.split("/")[0] for name in after}
    names = sorted(n for n in before.keys() | after.keys() if n.split("/")[0] in parts)
    different = [name for name in names if before.get(name) != after.get(name)]
    for name in different[: options.files]:
        print("\n".join(_difference(name, before.get(name), after.get(name), options.lines)))
    if len(different) > options.files:
        print(f"... and {len(different) - options.files} more:", *different[options.files :])
    said = ", ".join(sorted(parts)) or "nothing, which neither has in common"
    print(f"compared {said}: {len(names)} texts, {len(different)} differ")
    return 1 if different or not names else 0


def _read(folder: Path) -> dict[str, str]:
    files = (path for path in folder.glob("*/**/*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def _read_renames(path: Path) -> Renames:
    lines = [line.split(" -> ") for line in path.read_text().splitlines() if line.strip()]
    if wrong := [line for line in lines if len(line) != 2]:
        sys.exit(f"{path}: not `old -> new`: {' -> '.join(wrong[0])}")
    return [(old.strip(), new.strip()) for old, new in lines]


def _renamed(text: str, renames: Renames) -> str:
    for old, new in renames:
        text = text.replace(old, new)
    return text


def _difference(name: str, before: str | None, after: str | None, most: int) -> Iterator[str]:
    """As a unified difference of at most so many lines."""
    if before is None or after is None:
        yield f"=== {name}: only {'after' if before is None else 'before'}"
        return
    yield f"=== {name}"
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    lines = [line[:_LONGEST_LINE] for line in islice(found, 2, None)]
    yield from lines[:most]
    if len(lines) > most:
        yield f"... {len(lines) - most} more lines"


if __name__ == "__main__":
    sys.exit(main())
