from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mini_lab.measurement import machine

FACTS = {
    "cpu", "isa", "cores", "threads", "memory_bytes", "os", "python", "torch", "transformers", "numpy", "blas", "load_average",
    "gpu",
}  # fmt: skip


def broken(*arguments: object, **options: object) -> None:
    raise RuntimeError("this system has nothing")


def test_every_fact_is_there() -> None:
    facts = machine.facts()
    assert set(facts) == FACTS
    assert facts["cores"] >= 1
    assert facts["threads"] >= 1
    assert facts["gpu"] is None


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_a_system_that_answers_nothing_ends_no_run(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(subprocess, "run", broken)
    monkeypatch.setattr(Path, "read_text", broken)
    monkeypatch.setattr(platform, "platform", broken)
    monkeypatch.setattr(platform, "machine", broken)
    for name in ("sysconf", "getloadavg", "sched_getaffinity", "cpu_count"):
        monkeypatch.setattr(machine.os, name, broken, raising=False)
    facts = machine.facts("cuda")
    assert set(facts) == FACTS
    assert (facts["cpu"], facts["cores"], facts["os"]) == ("unknown", 1, system)
    assert facts["memory_bytes"] is facts["load_average"] is facts["gpu"] is None


def test_cpuinfo_of_x86_and_arm() -> None:
    first, second = "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 sse avx512f amx_tile\n", "model name\t: B\n"
    x86 = machine.parse_cpuinfo(f"{first}\n{second}")
    assert x86["model name"] == "A CPU"
    assert machine.relevant_isa(x86["flags"]) == ["avx2", "avx512f", "amx_tile"]
    arm = machine.parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 crc32\n")
    assert machine.relevant_isa(arm["Features"]) == ["asimd", "i8mm", "bf16"]


def test_blas_and_onednn_are_read_from_torchs_own_words() -> None:
    config = "PyTorch built with:\n  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80a)\n  - BLAS_INFO=mkl, LAPACK_INFO=mkl"
    assert machine.parse_torch_config(config) == "mkl, oneDNN v3.12.0"
    assert machine.parse_torch_config("nothing known") is None
