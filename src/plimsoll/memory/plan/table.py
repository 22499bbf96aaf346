"""A plan as text of 80 columns: what each kind of card and host holds in each phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from plimsoll.memory.contents.stores import Store, Use
from plimsoll.run.counting import gigabytes
from plimsoll.spec.run_spec import Phase

WIDTH = 80
_COLUMN = 7
_SMALL = 0.004
"""Items that are less than this share of the peak in every phase are shown together."""

SHORT: Mapping[Phase, str] = {
    "precompute": "before",
    "rollout": "roll",
    "train_critic": "critic",
    "train_actor": "actor",
}
"""Names of phases in a narrow column."""

Row = tuple[str, Mapping[Phase, int]]


def store_table(store: Store) -> str:
    """Rows: items, the largest first. Columns: phases, each at its fullest instant; GB."""
    uses = store.phases
    phases = [use.moment.phase for use in uses]
    totals = {use.moment.phase: use.bytes for use in uses}
    label = min(44, WIDTH - _COLUMN * len(phases))
    head = "".join(f"{SHORT.get(phase, phase):>{_COLUMN}}" for phase in phases)
    lines = [store.name, f"{'  GB, at its fullest':<{label}}{head}"]
    lines += [_line(name, sizes, phases, label) for name, sizes in _rows(uses, store.peak.bytes)]
    lines.append(" " * label + " ------" * len(phases))
    lines.append(_line("in all", totals, phases, label))
    if store.capacity is not None:
        capacity = dict.fromkeys(phases, store.capacity)
        lines.append(_line("load line", capacity, phases, label))
    return "\n".join(lines)


def _rows(uses: Sequence[Use], peak: int) -> Iterable[Row]:
    sizes: dict[str, dict[Phase, int]] = {}
    for use in uses:
        for item in use.items:
            name = item.name if item.role == "process" else f"{item.role} {item.name}"
            of_item = sizes.setdefault(name, {})
            of_item[use.moment.phase] = of_item.get(use.moment.phase, 0) + item.bytes
    large = {name: row for name, row in sizes.items() if max(row.values()) >= _SMALL * peak}
    yield from sorted(large.items(), key=lambda row: -max(row[1].values()))
    small = [row for name, row in sizes.items() if name not in large]
    if small:
        phases = dict.fromkeys(phase for row in small for phase in row)
        rest = {phase: sum(row.get(phase, 0) for row in small) for phase in phases}
        yield f"{len(small)} smaller item{'s' * (len(small) > 1)}", rest


def _line(name: str, sizes: Mapping[Phase, int], phases: Sequence[Phase], label: int) -> str:
    cells = [gigabytes(sizes[phase]) if sizes.get(phase) else "" for phase in phases]
    room = label - 2
    cut = name if len(name) <= room else name[: room - 1] + "~"
    return (f"  {cut:<{room}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()
