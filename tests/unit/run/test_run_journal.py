"""The journal: what was added is found again, also after a kill amid a record."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.records import TOKEN_REWARDS, Prompt, RewardPart, Trajectory, Turn, single_turn
from plimsoll.rl.group_journal import is_open
from plimsoll.run.journal import Journal


def sampled(place: int, text: str = "four") -> Trajectory:
    tokens = np.array([place, 5, 6])
    logprobs = np.array([-0.1, -1e-7, -12.345678], np.float32)
    part = RewardPart("right", 0.1 + 0.2, 2.0)
    prompt = Prompt(place, np.array([1, 2], np.int32), "2+2=", "4", columns={"level": 3})
    return single_turn(prompt, 0, tokens, logprobs, text, "stop", 7, (part,), group=place)


def plain(t: Trajectory) -> tuple[object, ...]:
    arrays = t.response_tokens, t.loss_mask, t.sampler_logprobs, t.weight_versions
    rest = t.group, t.sample_index, t.response_text, t.finish_reason, t.rewards, t.turns
    return (*(array.tobytes() for array in arrays), *rest, t.prompt.text, t.prompt.columns)


def found(journal: Journal, place: int) -> list[tuple[object, ...]] | None:
    groups = journal.groups(("group", place))
    return None if groups is None else [plain(t) for t in groups]


def test_what_was_added_is_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path, "lineage")
    assert journal.groups(("group", 3)) is None and not path.exists()
    earlier = sampled(1, "three")
    one = Trajectory(
        **{
            **{name: getattr(sampled(3), name) for name in Trajectory.__dataclass_fields__},
            "turns": (Turn("assistant", 0, 3, "four", 0.5),),
            "columns": {
                **sampled(3).columns,
                TOKEN_REWARDS: np.array([0.0, 0.25, 0.5], np.float32),
            },
            "figures": {"seconds": 0.125},
            "earlier": (earlier,),
        }
    )
    journal.add_groups(("group", 3), [one, sampled(4)])
    journal.add_figures(("figures", 2), {"reward": 0.1 + 0.2, "gap": float("inf")})
    again = Journal(path, "lineage")
    for each in (journal, again):
        assert found(each, 3) == [plain(one), plain(sampled(4))]
        assert each.figures(("figures", 2)) == {"reward": 0.1 + 0.2, "gap": float("inf")}
    groups = again.groups(("group", 3))
    assert groups is not None
    read = groups[0]
    assert read.figures == one.figures and plain(read.earlier[0])[:4] == plain(earlier)[:4]
    assert read.token_rewards is not None and read.token_rewards.tolist() == [0, 0.25, 0.5]


@given(st.integers(0, 4000), st.booleans())
def test_a_kill_or_a_damage_costs_only_what_follows_it(byte: int, cut: bool) -> None:
    """Wherever the file ends or a byte has changed, the records before are whole."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.bin"
        journal, ends = Journal(path, "lineage"), []
        for place in range(3):
            journal.add_groups(("group", place), [sampled(place)])
            ends.append(path.stat().st_size)
        content = path.read_bytes()
        at = byte * len(content) // 4001
        rest = b"" if cut else bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(content[:at] + rest)
        again = Journal(path, "lineage")
        for place, end in enumerate(ends):
            assert found(again, place) == ([plain(sampled(place))] if at >= end else None)
        again.add_groups(("group", 9), [sampled(9)])
        assert found(Journal(path, "lineage"), 9) == [plain(sampled(9))]


def test_a_damaged_length_ends_the_records_however_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path, "lineage")
    journal.add_groups(("group", 1), [sampled(1)])
    end = path.stat().st_size
    journal.add_groups(("group", 2), [sampled(2)])
    content = bytearray(path.read_bytes())
    content[end + 7] ^= 0x40  # of the eight bytes of a length: 2^62 more
    path.write_bytes(content)
    again = Journal(path, "lineage")
    assert found(again, 1) == [plain(sampled(1))] and found(again, 2) is None


def test_another_lineage_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    Journal(path, "one").add_groups(("group", 3), [sampled(3)])
    assert found(Journal(path, "other"), 3) is None and not path.exists()


def test_what_is_learned_from_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path, "lineage")
    for place in range(4):
        journal.add_groups(("group", place), [sampled(place)])
    of_steps = [(what, step, 0) for step in (4, 5, 6) for what in ("request", "held out")]
    for key in of_steps:
        journal.add_groups(key, [sampled(8)])
    journal.add_figures(("figures", 4), {"reward": 1.0})
    journal.keep(lambda key: is_open(key, 5, unlearned={1}, next_place=3, saved=3))
    assert [found(journal, place) is None for place in range(4)] == [True, False, True, False]
    assert journal.figures(("figures", 4)) == {"reward": 1.0}
    kept = [key[:2] for key in of_steps if journal.groups(key) is not None]
    assert kept == [("held out", 5), ("request", 6), ("held out", 6)]
    journal.keep(lambda key: is_open(key, 7, unlearned=(), next_place=4, saved=4))
    assert not path.exists()
    journal.add_groups(("group", 5), [sampled(5)])
    assert found(Journal(path, "lineage"), 5) == [plain(sampled(5))]
