"""The report of a run as one HTML file that needs nothing beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from plimsoll.run.comparison import Comparison, Measure, kind_of
from plimsoll.run.curves import Drawing
from plimsoll.run.held_out import Estimate
from plimsoll.run.numbers import duration_text, gigabytes_text
from plimsoll.run.standing import BEFORE_STEPS
from plimsoll.run.trajectories import SampledResponse

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Sampled:
    """Some responses of a step."""

    step: int
    responses: Sequence[SampledResponse]


@dataclass(frozen=True)
class Page:
    """What a report shows.

    job: as its command is called, such as `sft`; None where config.yaml does not say it.
    step: the last that has ended; steps: of the whole run, None where config.yaml is not there.
    held_out: by metric, its number in each of the evaluations; labels: of metrics, for people.
    calibration: of a reward model, as PNG; plan: as SVG. Both where there is one.
    seconds: by phase. comparisons: of the fullest process of each kind in each phase; processes:
    how many there are of a kind. config: YAML.
    """

    title: str
    job: str | None
    model: str
    step: int
    steps: int | None
    held_out: Mapping[str, Sequence[Estimate | None]]
    evaluations: Sequence[str]
    labels: Mapping[str, str]
    curves: Sequence[Drawing]
    calibration: bytes | None
    sampled: Sampled | None
    seconds: Mapping[str, float]
    time_curves: Sequence[Drawing]
    remarks: Sequence[str]
    comparisons: Sequence[Comparison]
    processes: Mapping[str, int]
    memory_curves: Sequence[Drawing]
    plan: bytes | None
    config: str

    @property
    def has_intervals(self) -> bool:
        """Whether any number of held-out data has one."""
        return any(one and one.interval for own in self.held_out.values() for one in own)

    @property
    def before_steps(self) -> dict[str, float]:
        """Seconds of reading data and loading, by phase."""
        return {phase: s for phase, s in self.seconds.items() if phase in BEFORE_STEPS}

    @property
    def in_steps(self) -> dict[str, float]:
        """Seconds of the other phases, which make up the steps."""
        return {phase: s for phase, s in self.seconds.items() if phase not in BEFORE_STEPS}

    @property
    def memory(self) -> list[Mapping[Measure, Comparison]]:
        """The numbers of a process in a phase, by measure."""
        rows = groupby(self.comparisons, lambda one: (one.process, one.phase))
        return [{one.measure: one for one in own} for _, own in rows]


def report_page(page: Page) -> str:
    """The whole file."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "gigabytes": gigabytes_text,
        "duration": duration_text,
        "kind": kind_of,
        "base64": lambda data: b64encode(data).decode(),
    }
    template = files("plimsoll.commands").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    text: str = environment.from_string(template).render(page=page)
    return text
