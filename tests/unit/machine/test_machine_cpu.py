"""Whether a CPU multiplies bfloat16, by its flags and by what oneDNN may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.machine import host

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx2 {}\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\n"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file that replaces /proc/cpuinfo."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "Path", lambda _: file)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    host.cpu_flags.cache_clear()
    return file


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    host.cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("text", "multiplies"),
    [
        (X86.format("fma"), False),
        (X86.format("avx512f avx512_vnni"), False),
        (X86.format("avx512f avx512_bf16"), True),
        (X86.format("amx_tile amx_bf16"), True),
        (ARM.format("sve"), False),
        (ARM.format("sve bf16"), True),
        ("", False),
    ],
)
def test_a_cpu_by_its_flags(cpuinfo: Path, text: str, multiplies: bool) -> None:
    cpuinfo.write_text(text)
    assert host.multiplies_bfloat16() is multiplies


def test_a_system_that_lists_no_flags(cpuinfo: Path) -> None:
    assert not host.multiplies_bfloat16()


@pytest.mark.parametrize(
    ("limit", "multiplies"),
    [
        ("AVX2", False),
        ("AVX512_CORE_VNNI", False),
        ("avx512_core_bf16", True),
        ("AVX512_CORE_AMX", True),
        ("ALL", True),
    ],
)
def test_what_one_dnn_may_not_use_does_not_count(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch, limit: str, multiplies: bool
) -> None:
    cpuinfo.write_text(X86.format("avx512_bf16 amx_bf16"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert host.multiplies_bfloat16() is multiplies
