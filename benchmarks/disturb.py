"""Run a job again and again with random faults: does it survive them?

    export PYTHONPATH=tests/support
    python benchmarks/disturb.py grpo grpo.yaml --faults 20 --run.steps 6 --run.save_every 1

notes/reliability.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chaos import ChaosRequest, run_chaos
from chaos.draw import RANDOM_KINDS
from chaos.table import summary_text, table_text
from plimsoll.errors import PlimsollError


def main(words: Sequence[str]) -> int:
    """Disturb the job that `words` name; return 1 if a run did not end right."""
    parser = argparse.ArgumentParser(
        prog="disturb.py",
        usage="python benchmarks/disturb.py JOB CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Run a job again and again with random faults in its processes, and say "
        "whether each run ended right, how long it took to recover, and what differs from an "
        "undisturbed run, which comes first. Goes on where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("job", metavar="JOB", help="such as grpo")
    parser.add_argument("config", help="a config of the job; short runs are enough")
    parser.add_argument("--faults", type=int, default=10, help="in all (%(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="in each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (%(default)s)")
    parser.add_argument("--kinds", metavar="KIND,...", help="default: all, one after another")
    parser.add_argument("--points", metavar="POINT,...", help="default: all that the run reaches")
    parser.add_argument("--directory", default="chaos", help="for the runs (%(default)s)")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="without a new step, after which a run is ended (%(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs that ended right, too")
    options, flags = parser.parse_known_args(words)
    request = ChaosRequest(
        [options.job, options.config, *flags],
        Path(options.directory),
        options.faults,
        options.at_once,
        options.seed,
        options.kinds.split(",") if options.kinds else RANDOM_KINDS,
        options.points.split(",") if options.points else (),
        options.patience,
        options.keep,
    )
    try:
        rows = run_chaos(request, print)
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{table_text(rows)}\n\n{summary_text(rows)}")
    wrong = [str(row["number"]) for row in rows if row["code"] != 0]
    if wrong:
        print(f"runs that did not end right: {', '.join(wrong)}; see faults-NUMBER/output.txt")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
