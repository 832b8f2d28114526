"""What a measurement says that it ran on."""

from pathlib import Path

import pytest

from tools.bench import machine

INTEL = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"


def test_processor_and_its_matrix_units_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    cpuinfo.write_text(INTEL * 2)
    assert machine.describe_machine() == f"Some Xeon, {machine.usable_cores()} cores"
    assert machine.has_amx()
    assert machine.describe_matrix_units().endswith("; amx_bf16, avx512_bf16, avx512f, avx2")
    cpuinfo.write_text(INTEL.replace(" amx_bf16", ""))
    assert not machine.has_amx()
    assert machine.describe_matrix_units().endswith("avx2; no amx_bf16")


def test_not_every_system_has_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert not machine.has_amx()
    assert machine.describe_matrix_units().endswith("no flags known; no amx_bf16")
