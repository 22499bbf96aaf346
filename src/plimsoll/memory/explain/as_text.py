"""An explanation of running out of memory, for a person to read; 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.advise.as_text import change_lines
from plimsoll.memory.explain.explain import Explanation
from plimsoll.memory.plan.as_text import wrap_lines
from plimsoll.run.counting import gigabytes_text
from plimsoll.run.readings import Footprint

_NAMES = {
    "allocated": "allocated by torch",
    "reserved": "reserved by torch",
    "device": "used on the card by all",
    "host": "host",
}


def explanation_text(explanation: Explanation) -> str:
    """Return the whole explanation as a block."""
    return "\n".join(
        [
            *_where(explanation),
            *_measures(explanation),
            *_items(explanation),
            *_findings(explanation),
            *_change(explanation),
        ]
    )


def _where(explanation: Explanation) -> Iterator[str]:
    seen = explanation.incident.seen
    assert seen is not None
    where = f"{explanation.incident.where} memory of {seen.process}, node {seen.node}"
    yield _wrap(f"Where: {where}; phase {explanation.phase}, role {explanation.role}")
    if explanation.incident.asked is not None:
        yield f"Asked for: {gigabytes_text(explanation.incident.asked)} more"


def _measures(explanation: Explanation) -> Iterator[str]:
    """Yield the measured and the predicted bytes of the process."""
    when = "when it failed" if explanation.at_failure else "when it was last read"
    measured = explanation.measured
    if measured is None:
        yield "Measured: nothing, because it failed before it was first read"
    else:
        yield _wrap(f"Measured {when}: {_footprint(measured)}")
    if explanation.predicted is None:
        yield f"Predicted: nothing, because the plan has no phase {explanation.phase}"
    else:
        yield _wrap(f"Predicted for the phase: {_footprint(explanation.predicted)}")


def _footprint(footprint: Footprint) -> str:
    sizes = ((words, getattr(footprint, name)) for name, words in _NAMES.items())
    return ", ".join(f"{gigabytes_text(s)} {words}" for words, s in sizes if s is not None)


def _items(explanation: Explanation) -> Iterator[str]:
    yield f"The largest items of the {explanation.store.place} in this phase, as predicted:"
    for item in explanation.items:
        yield f"  {gigabytes_text(item.bytes):>8}  {item.role} {item.name}"


def _findings(explanation: Explanation) -> Iterator[str]:
    for number, finding in enumerate(explanation.findings, 1):
        yield f"{number}. {finding.question} {finding.verdict}:"
        yield wrap_lines(f"   {finding.text}", "   ")


def _change(explanation: Explanation) -> Iterator[str]:
    if explanation.should_have_fitted:
        yield _wrap(
            "By these numbers it should have fitted: look for a limit on the process (ulimit -v, a "
            "cgroup), or for a peak that the plan does not have."
        )
    room, change = gigabytes_text(explanation.room), explanation.change
    place = explanation.store.place
    if change is None:
        yield _wrap(
            f"No change that was tried brings the {place}'s peak under {room}: it takes more "
            f"memory, or more nodes."
        )
        return
    yield _wrap(f"The smallest change that brings the {place}'s peak under {room}, by the plan:")
    yield from change_lines(change)


def _wrap(text: str) -> str:
    return wrap_lines(text, "  ")
