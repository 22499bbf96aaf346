"""Records all that can be observed of plimsoll, for comparison with another state of its source:
`python tests/baseline/record.py DIRECTORY [--only plans,refusals,texts,runs]`, with the Python
whose plimsoll is meant. `compare.py` compares two recordings.

It knows the command line, configs and run directories, and nothing of how the source is laid out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from calls import run_calls
from plans import plan_calls
from refusals import refusal_calls, write_coverage
from runs import record_runs
from texts import text_calls

_PARTS = {"plans": plan_calls, "refusals": refusal_calls, "texts": text_calls}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="plans,refusals,texts,runs")
    parser.add_argument("--run", action="append", help="of the runs, this one alone")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {*_PARTS, "runs"}:
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
            _record(part, home, options.directory, options.run)
            print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _open(directory: Path, parser: argparse.ArgumentParser) -> None:
    """Parts of a recording are written anew; nothing else is taken away."""
    mark = directory / ".recording"
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        parser.error(f"{directory} holds something that is no recording")
    directory.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _record(part: str, home: Path, out: Path, chosen: list[str] | None) -> None:
    paths = {str(home): "HOME", tempfile.gettempdir(): "TMP"}
    if part == "runs":
        record_runs(home, out, paths, chosen)
        return
    calls = [*_PARTS[part](home)]
    said = run_calls(calls, out, paths)
    print(f"{part}: {len(calls)} calls", flush=True)
    if part == "refusals":
        print(f"  codes that no call meets: {', '.join(write_coverage(out, said)) or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
