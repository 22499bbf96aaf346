"""What a person sees of a plan: 80 columns, bars under the line."""

from __future__ import annotations

import pytest
from rule_cases import config

from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.contents.contents import contents_of, make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import Store
from plimsoll.memory.plan import draw_bars, store_table, wrap_lines
from plimsoll.resolve.run_spec import PHASES
from plimsoll.run.numbers import gigabytes
from plimsoll.timeline.items import KINDS, Allocation, Item, Kind, Moment

GB = 10**9


def item(role: str, name: str, size: int, kind: Kind = "weights") -> Item:
    return Item(role, kind, name, "device", "allocated", size, "by hand", "a test")


def store(capacity: int | None) -> Store:
    always = frozenset(Moment(phase, "step") for phase in PHASES)
    step = frozenset({Moment("train_actor", "step")})
    held = (
        Allocation(
            item("actor", "weights of a name that is far too long for any column", 20 * GB), always
        ),
        Allocation(item("process", "CUDA context", GB, "processes"), always),
        Allocation(item("actor", "moments", 40 * GB, "optimizer states"), step),
        Allocation(item("actor", "crumbs", 10**6), step),
        Allocation(item("critic", "crumbs", 10**6), step),
    )
    return Store("device", (((0,), 0), ((0,), 1)), "A100-80GB", capacity, held, 0.0)


def test_gigabytes_have_three_digits() -> None:
    found = [gigabytes(n) for n in (0, 5 * 10**6, 9_994_999_999, 9_995_000_000, 99_960_000_000)]
    assert found == ["0.00", "0.01", "9.99", "10.0", "100"]
    assert gigabytes(1_234_567 * 10**6) == "1,235"


@pytest.mark.parametrize("capacity", [80 * GB, 50 * GB, None])
def test_the_table_fits_80_columns_and_adds_up(capacity: int | None) -> None:
    lines = store_table(store(capacity)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "2 x A100-80GB (node 0, cards 0-1)"
    total = next(line for line in lines if line.startswith("  in all"))
    assert total.split()[2:] == [*["21.0"] * 5, "61.0", "21.0", "21.0"]
    assert any(line.startswith("  2 other items") for line in lines)
    assert any(line.startswith("  load line") for line in lines) == (capacity is not None)


def test_bars_are_as_long_as_their_bytes_and_the_line_is_where_the_card_is_full() -> None:
    fits = draw_bars(store(80 * GB), unicode=False).splitlines()
    actor = next(line for line in fits if line.strip().startswith("actor"))
    assert max(map(len, fits)) <= 80
    bar = actor[10:].split("|")[0]
    # 61.0 of 80 GB on 56 columns: 20 of weights, 40 of moments, 1 of the process
    assert (bar.count("#"), bar.count("+"), bar.count(".")) == (14, 28, 1)
    assert actor[10:].index("|") == 56
    over = draw_bars(store(50 * GB), unicode=False).splitlines()
    actor = next(line for line in over if line.strip().startswith("actor"))
    assert actor[10:].index("|") == round(56 * 50 / 61.002)


def test_bars_are_plain_ascii_where_they_must_be() -> None:
    assert draw_bars(store(80 * GB), unicode=False).isascii()
    assert "█" in draw_bars(store(80 * GB), unicode=True)


def test_every_item_has_a_kind() -> None:
    """Whole runs have all that a role holds, the engines and the processes."""
    split = {"cluster.ranks": 4, "rollout.vllm.sleep_level": 1, "rollout.placement": "shared"}
    adapted = {"actor.adapter.rank": 8, "critic.zero.stage": 0, "actor.ema.decay": 0.9}
    jobs = [config("ppo", split | {"rollout.engines": 4}), config("ppo", adapted)]
    hardware = parse_cluster("8xA100-80GB", 1, 10**12)
    kinds: dict[tuple[str, str], Kind] = {}
    for job in [make_job(spec_of(one), hardware, Constants()) for one in jobs]:
        for process in job.layout.processes:
            for one in contents_of(job, process):
                kinds[one.item.role, one.item.name] = one.item.kind
    roles = {"rollout": "rollout engines", "process": "processes"}
    of_role = {name: {kind for (role, _), kind in kinds.items() if role == name} for name in roles}
    assert of_role == {name: {kind} for name, kind in roles.items()}
    assert kinds["reference", "frozen weights"] == "frozen models"
    names: dict[Kind, tuple[str, ...]] = {
        "activations": ("activations", "input ids and rotary tables", "logits chunk"),
        "buffers": ("reduce bucket", "copy while loading", "checkpoint file", "model to save"),
        "gradients": ("accumulated gradients", "widened gradient", "fp32 gradients"),
        "optimizer states": ("fp32 masters", "moments", "moving average of masters"),
        "weights": ("weights", "frozen weights"),
    }
    trained = [(name, kind) for (role, name), kind in kinds.items() if role in ("actor", "critic")]
    for expected, items in names.items():
        assert {(name, kind) for name, kind in trained if name in items} == {
            (name, expected) for name in items
        }
    assert {*kinds.values()} == {*KINDS} and len(KINDS) == 8


def test_a_path_stays_whole_however_long() -> None:
    path = f"runs/{'long-name_' * 12}/model"
    assert path in wrap_lines(f"the directory {path} is full", "  ").split()
