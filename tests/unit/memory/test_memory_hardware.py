"""Cards by name, clusters by hand, amounts of memory, and this machine with a driver made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.hardware import (
    CARDS,
    Card,
    Hardware,
    Node,
    find_card,
    find_machine,
    live_machine,
    parse_bytes,
    parse_cluster,
)
from plimsoll.machine.host import live_host
from plimsoll.machine.local_host import read_local_host

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "printed"),  # the total capacity in PyTorch's out-of-memory errors, GiB
    [
        ("A100-40GB", "39.39"),
        ("A100-80GB", "79.15"),
        ("H100-80GB", "79.11"),
        ("H200", "139.72"),
        ("B200", "178.35"),
        ("L40S", "44.42"),
        ("L4", "22.03"),
        ("A10", "22.06"),
        ("A6000", "47.53"),
        ("A40", "44.35"),
        ("H20", "95.00"),
        ("RTX3090", "23.50"),
        ("RTX4090", "23.52"),
        ("RTX5090", "31.36"),
        ("V100-16GB", "15.75"),
        ("V100-32GB", "31.73"),
        ("T4", "14.56"),
        ("A30", "23.53"),
        ("L40", "44.40"),
        ("A5000", "23.68"),
        ("A4000", "15.61"),
        ("RTXPRO6000", "94.97"),
        ("RTX2080Ti", "10.75"),
    ],
)
def test_usable_bytes_are_what_cuda_programs_see(name: str, printed: str) -> None:
    assert f"{find_card(name).usable_bytes / GIB:.2f}" == printed


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_driver_keeps_some_of_each_card_but_not_much(card: Card) -> None:
    assert find_card(card.name) is card
    assert 0.90 * card.nominal_bytes < card.usable_bytes < card.nominal_bytes
    assert card.source and card.memory_bandwidth > card.link_bandwidth


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100-80gb", "A100-80GB"),
        ("A100-80G", "A100-80GB"),
        ("a100 40", "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100", "H100-80GB"),
        ("H200-141GB", "H200"),
        ("4090", "RTX4090"),
        ("RTX-4090", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("RTX A6000", "A6000"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000"),
        ("PRO 6000", "RTXPRO6000"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX4080SUPER"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA H800", "H800-80GB"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A40", "A40"),
    ],
)
def test_cards_are_found_by_what_people_and_drivers_call_them(written: str, name: str) -> None:
    assert find_card(written).name == name


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("A100", ["A100-40GB or A100-80GB"]),
        ("V100", ["V100-16GB or V100-32GB"]),
        ("H100-40GB", ["No card", "H100-80GB"]),
        ("A10O", ["Did you mean A10", "Known: A100-40GB", "and cpu", "24GB"]),
        ("H10O", ["Did you mean H100-80GB?"]),
        ("RTX 4090 D", ["RTX4090"]),
        ("NVIDIA H20-3e", ["No card", "H20"]),
        ("Quadro RTX 6000", ["No card", "RTX6000Ada"]),
        ("RTX 3080", ["RTX3080-10GB or RTX3080-12GB"]),
        ("", ["No card"]),
    ],
)
def test_unknown_cards_are_refused_with_what_is_known(written: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_card(written)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("maker", "names"),
    [
        (
            "AMD",
            "MI300X, mi300a, MI325X, MI355X, MI250, MI250X, MI210, MI100, AMD Instinct MI300X, "
            "MI300X-192GB, Radeon RX 7900 XTX, RX7900XTX, Radeon PRO W7900, W7900",
        ),
        ("Intel", "Gaudi2, gaudi-3, HL-225, Max 1550, Intel Data Center GPU Max 1100, Arc A770"),
        ("Google", "TPUv4, TPU v5e, v5e-8, v5p, v5litepod-16, v6e, v4-32, Trillium, Ironwood"),
    ],
)
def test_cards_of_other_makers_are_named_as_theirs(maker: str, names: str) -> None:
    for name in names.split(", "):
        with pytest.raises(ConfigError) as caught:
            parse_cluster(f"8x{name}", 1, None)
        said = str(caught.value)
        assert said.startswith(f"{name!r} is made by {maker}, and not supported"), said
        assert "Did you mean" not in said


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_mistyped_card_is_not_taken_for_another_makers(card: Card) -> None:
    mistyped = (f"{card.name}0", card.name[:-1], card.name[1:], f"NVIDIA {card.name} Max", "Z9")
    for name in mistyped:
        try:
            find_card(name)
        except ConfigError as error:
            assert "made by" not in str(error)


def test_clusters() -> None:
    eight = parse_cluster("8xA100-80GB", nodes=2, host_memory=10**12)
    assert eight == Hardware(Node((find_card("A100-80GB"),) * 8, 10**12), 2)
    assert parse_cluster("H100", 1, None) == Hardware(Node((find_card("H100"),), None))
    assert parse_cluster(" cpu ", 1, 5) == Hardware(Node((), 5))
    assert len(parse_cluster("4 x 4090", 1, None).node.cards) == 4
    # No tebibytes.
    assert parse_cluster("2x2080Ti", 1, None).node.cards == (find_card("RTX2080Ti"),) * 2


def test_a_card_by_hand_has_the_bytes_that_are_written() -> None:
    node = parse_cluster("4x24GB", 1, None).node
    assert [card.usable_bytes for card in node.cards] == [24 * 10**9] * 4
    assert node.cards[0].compute_capability is None
    assert parse_cluster("22.5GiB", 1, None).node.cards[0].usable_bytes == 45 * GIB // 2


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        *((text, 8, "H100-80GB") for text in ("8 H100", "8 x H100", "8x H100", " 8  h100 80gb ")),
        ("2 4090", 2, "RTX4090"),
        ("4080 SUPER", 1, "RTX4080SUPER"),
        ("3090 24GB", 1, "RTX3090"),
        *((text, 1, text) for text in ("24 GB", "24 g", "22 GiB")),
    ],
)
def test_how_many_cards_may_stand_before_a_space(text: str, count: int, name: str) -> None:
    cards = parse_cluster(text, 1, None).node.cards
    assert [card.name for card in cards] == [name] * count


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("80 H100", "from 1 to 64 cards"),
        *((text, repr(text)) for text in ("0xH100", "-8xH100", "1.5xH100", "8000xH100", "2xcpu")),
        *((f"8x{name}", f"No card is called {name!r}") for name in ("", "24", "Z9")),
        ("2x8xH100", "'2x8xH100' is not"),
        ("1e9xH100", "'1e9xH100' is not"),
        ("8xH100,4xA100-80GB", "of one kind, such as 8xA100-80GB"),
        ("8xA100,H100", "cluster.nodes (--nodes)"),
        ("8xA100", "A100-40GB or A100-80GB"),
        ("3x1MB", "no GPU has"),
        ("2x9TB", "no GPU has"),
        ("-24GB", "no amount of memory"),
    ],
)
def test_wrong_clusters_are_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, 1, None)
    assert part in str(caught.value)


@pytest.mark.parametrize(("nodes", "memory"), [(0, 1), (-1, None), (10**6, None), (1, 0), (1, -5)])
def test_absurd_machines_are_refused(nodes: int, memory: int | None) -> None:
    with pytest.raises(ConfigError, match=str(nodes if memory is None or nodes < 1 else memory)):
        parse_cluster("cpu", nodes, memory)


@given(st.integers(1, 900), st.sampled_from("kmgtp"), st.booleans(), st.sampled_from(["", " "]))
def test_units_are_decimal_or_binary(count: int, unit: str, binary: bool, gap: str) -> None:
    power = "kmgtp".index(unit) + 1
    expected = count * (2 ** (10 * power) if binary else 10 ** (3 * power))
    text = f"{count}{gap}{unit}{'i' if binary else ''}b"
    assert parse_bytes(text) == parse_bytes(text.upper()) == expected


def test_plain_numbers_are_bytes() -> None:
    assert parse_bytes("900e9") == 900_000_000_000
    assert parse_bytes("1.5TB") == 1_500_000_000_000
    assert parse_bytes("17") == parse_bytes("17 B") == 17


@pytest.mark.parametrize("text", ["", "0", "0GB", "-1GB", "1e40", "nan", "inf", "1,000GB", "GB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value) and "512GiB" in str(caught.value)


Tell = Callable[..., None]


def test_the_live_machine_is_what_the_driver_says(tell_cards: Tell) -> None:
    tell_cards(
        "0, GPU-a, NVIDIA GeForce RTX 4090, 24564, 480, 300, 8.9, 580.1, [N/A]",
        "1, GPU-b, NVIDIA Nonesuch, 10000, [N/A], 0, [N/A], 580.1, [N/A]",
    )
    known, unknown = live_machine().cards
    assert known.usable_bytes == (24564 - 480) * 2**20
    assert known.bf16_flops == find_card("4090").bf16_flops
    assert known.compute_capability == (8, 9)
    assert (unknown.name, unknown.usable_bytes) == ("NVIDIA Nonesuch", 10000 * 2**20)
    assert unknown.compute_capability is None


def test_hidden_cards_are_no_part_of_the_machine(
    tell_cards: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_cards("0, GPU-a, Tesla T4, 15360, 450, 0, 7.5, 1, [N/A]")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert live_machine().cards == ()


def test_a_card_that_mig_has_cut_is_not_taken_for_a_whole_one(
    tell_cards: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        _part("MIG-c7", "3g.20gb", "19968"),
        _part("MIG-d8", "1g.5gb", "4864"),
        _part("MIG-d9", "1g.5gb", "[N/A]"),
    ]
    tell_cards(
        (
            "0, GPU-a, NVIDIA A100-SXM4-40GB, 40960, 580, 0, 8.0, 580.1, Enabled",
            {"parts": parts},
        ),
        "1, GPU-b, NVIDIA A100-SXM4-40GB, 40960, 580, 0, 8.0, 580.1, Disabled",
    )
    for visible in ("0,1", "MIG-d9", "MIG-d", "GPU-a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ConfigError, match="GPU 0 into 3 instances"):
            live_machine()
    assert len(find_machine().cards) == 1  # so that what is given by hand can be held against it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert live_machine().cards == find_machine().cards != ()


def test_an_instance_that_is_named_or_the_only_one_is_the_card_of_a_run(
    tell_cards: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = "0, GPU-a, NVIDIA A100-SXM4-40GB, 40960, 580, 0, 8.0, 580.1, Enabled"
    parts = [_part("MIG-c7", "3g.20gb", "19968"), _part("MIG-d8", "1g.5gb", "4864")]
    tell_cards((card, {"parts": parts}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-d8")
    (named,) = live_machine().cards
    assert named.usable_bytes == 4864 * 2**20 and named.compute_capability == (8, 0)
    tell_cards((card, {"parts": parts[:1]}))
    for visible in ("0", "GPU-a", "MIG-c7", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (only,) = live_machine().cards
        assert (only.name, only.usable_bytes) == ("A100 MIG 3g.20gb", 19968 * 2**20)


def _part(uuid: str, size: str, mib: str) -> dict[str, object]:
    memory = {"memory.total": mib, "memory.reserved": "0", "memory.used": "12"}
    return {"uuid": uuid, "name": f"A100 MIG {size}", **memory}


def test_a_card_of_unknown_size_is_refused(tell_cards: Tell) -> None:
    """A GB10 has no memory of its own; nvidia-smi says [N/A]."""
    tell_cards("0, GPU-a, NVIDIA GB10, [N/A], [N/A], [N/A], 12.1, 580.95.05, [N/A]")
    with pytest.raises(ConfigError, match=r"GPU 0 \(NVIDIA GB10\).*90GiB"):
        live_machine()
    assert find_machine().cards[0].compute_capability == (12, 1)
    (free,) = read_local_host(()).free_bytes
    assert 0 < free <= live_host().capacity_bytes


def test_a_failing_driver_is_an_error(tell_cards: Tell) -> None:
    said = "Driver/library version mismatch"
    tell_cards(trouble=said)
    with pytest.raises(PlimsollError, match=said):
        live_machine()
