"""Records all that can be observed of plimsoll, for comparison with another state of its source:
`python tests/baseline/record.py DIRECTORY [--only plans,refusals,texts,runs]`, with the Python
whose plimsoll is meant. `compare.py` compares two recordings.

Of another state of the source, `--pages` plans the configs of its examples and pages, and
`--begun-by` has its Python begin the runs that are resumed, exported and evaluated here.

It knows the command line, configs and run directories, and nothing of how the source is laid out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from calls import Call, run_calls
from plain import ROOT
from plans import plan_calls
from refusals import refusal_calls, write_coverage
from runs import record_runs
from texts import text_calls

_PARTS = ("plans", "refusals", "texts", "runs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="plans,refusals,texts,runs")
    parser.add_argument("--run", action="append", help="of the runs, this one alone")
    parser.add_argument("--pages", type=Path, default=ROOT, help="a source, not this one")
    parser.add_argument("--begun-by", default=sys.executable, help="a Python, not this one")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {*_PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    _open(options.directory, parser)
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        home = Path(folder)
        if wanted != ["plans"]:
            from task import write_task  # torch takes its seconds

            write_task(home)
        for part in wanted:
            begun = time.monotonic()
            if options.run is None:
                shutil.rmtree(options.directory / part, ignore_errors=True)
            _record(part, home, options)
            print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _open(directory: Path, parser: argparse.ArgumentParser) -> None:
    """Parts of a recording are written anew; nothing else is taken away."""
    mark = directory / ".recording"
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        parser.error(f"{directory} holds something that is no recording")
    directory.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _record(part: str, home: Path, options: argparse.Namespace) -> None:
    out: Path = options.directory
    paths = {str(home): "HOME", tempfile.gettempdir(): "TMP"}
    if part == "runs":
        record_runs(home, out, paths, options.run, options.begun_by)
        return
    calls = [*_calls(part, home, options.pages)]
    said = run_calls(calls, out, paths)
    print(f"{part}: {len(calls)} calls", flush=True)
    if part == "refusals":
        print(f"  codes that no call meets: {', '.join(write_coverage(out, said)) or 'none'}")


def _calls(part: str, home: Path, pages: Path) -> Iterator[Call]:
    match part:
        case "plans":
            return plan_calls(home, pages)
        case "refusals":
            return refusal_calls(home)
    return text_calls(home)


if __name__ == "__main__":
    sys.exit(main())
