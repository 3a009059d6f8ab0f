"""Joules from the processor's counters, laid out as Linux lays them out; and the reason where there are none."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_mini_lab.measurement.energy import find_energy, rapl


def zone(powercap: Path, name: str, kind: str, microjoules: int, size: int = 1_000_000) -> Path:
    folder = powercap / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{kind}\n")
    (folder / "max_energy_range_uj").write_text(f"{size}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_are_summed_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    two = zone(tmp_path, "intel-rapl:1", "package-1", 200)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 50)
    energy = rapl(tmp_path)
    assert (energy.source, energy.reason) == ("RAPL (2 processor packages)", None)
    before = energy.read()
    for counter, value in ((one, 1100), (two, 3200), (core, 900_000)):
        counter.write_text(str(value))
    after = energy.read()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(4000e-6)


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 999_000, size=999_999)
    energy = rapl(tmp_path)
    before = energy.read()
    counter.write_text("500")
    after = energy.read()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(1500e-6)


def test_where_there_is_no_counter_the_reason_is_told(tmp_path: Path) -> None:
    assert rapl(tmp_path / "none").reason == f"no processor package in {tmp_path / 'none'}"
    (tmp_path / "intel-rapl:0").mkdir()
    missing = rapl(tmp_path)
    assert (missing.source, missing.read()) == (None, None)
    assert missing.reason == "intel-rapl:0: No such file or directory"


@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 1)() == 0, reason="root may read everything")
def test_a_counter_that_only_root_may_read_is_told(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 100).chmod(0)
    assert rapl(tmp_path).reason == "intel-rapl:0: Permission denied"


def test_a_counter_that_vanishes_gives_no_figure(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    energy = rapl(tmp_path)
    counter.unlink()
    assert energy.read() is None


def test_a_gpu_that_nvml_cannot_be_asked_about_ends_no_run() -> None:
    energy = find_energy("cuda")
    assert energy.source is not None or str(energy.reason).startswith("NVML: ")
