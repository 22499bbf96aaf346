"""Compare the plan of each process with the nodes and cards that a run really got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from plimsoll.errors import DoesNotFit
from plimsoll.run.numbers import gigabytes
from plimsoll.run.readings import Footprints, Reading


def refuse_smaller_nodes(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> None:
    """Raise DoesNotFit if a node or card is smaller than the plan of its processes needs.

    The error lists each such node and card.

    Args:
        predicted: the planned footprints of each process, by phase.
        readings: the reading of each process, with the sizes of its node and card.
    """
    too_small = [*_small_nodes(predicted, readings), *_small_cards(predicted, readings)]
    if too_small:
        raise DoesNotFit(
            "\n  ".join(["the run does not fit the nodes that it was given", *too_small])
            + "\n  Look at `plimsoll plan --suggest` with cluster.hardware and "
            "cluster.host_memory as they are; --force starts a run that its plan refuses."
        )


def _small_nodes(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> Iterator[str]:
    def node_of(name: str) -> str:
        return readings[name].host.node

    for node, group in groupby(sorted(readings, key=node_of), key=node_of):
        names = list(group)
        phases = {phase for name in names for phase in predicted.get(name, {})}
        planned = ([predicted.get(name, {}).get(phase) for name in names] for phase in phases)
        sums = (sum(f.host for f in footprints if f is not None) for footprints in planned)
        need = max(sums, default=0)
        capacity = readings[names[0]].host.capacity
        if need > capacity:
            yield (
                f"node {node} has {gigabytes(capacity)} GB of host memory, and the plan has "
                f"{gigabytes(need)} GB for {', '.join(names)}, which are there"
            )


def _small_cards(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> Iterator[str]:
    for name, reading in readings.items():
        peaks = predicted.get(name, {}).values()
        need = max((peak.device or 0 for peak in peaks), default=0)
        if reading.card is not None and need > reading.card.capacity:
            yield (
                f"the card of {name}, on node {reading.host.node}, has "
                f"{gigabytes(reading.card.capacity)} GB, and the plan has {gigabytes(need)} GB on "
                f"it"
            )
