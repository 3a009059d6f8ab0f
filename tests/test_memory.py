"""Peak memory: counted from the moment that a run begins where the system can, and never by a figure that is not one."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_mini_lab.measurement import memory
from dflash_mini_lab.measurement.memory import Memory, find_memory, of_linux

MIB = 2**20


def test_what_a_run_held_and_gave_back_is_in_its_peak() -> None:
    found = find_memory("cpu")
    assert found.source is not None
    before = found.peak()
    block = np.ones(64 * MIB, dtype=np.uint8)
    del block
    after = found.peak()
    assert before is not None
    assert after is not None
    assert found.before is not None
    assert after >= found.before + 60 * MIB


@pytest.mark.skipif(not memory.STATUS.is_file(), reason="Linux's own")
def test_what_the_process_held_before_the_run_is_not_the_run_s() -> None:
    block = np.ones(96 * MIB, dtype=np.uint8)
    del block
    found = find_memory("cpu")
    peak = found.peak()
    assert found.source == "resident memory of the process"
    assert peak is not None
    assert found.before is not None
    assert peak < found.before + 48 * MIB


def test_where_the_peak_cannot_be_reset_it_is_the_process_s_and_says_so(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    found = of_linux(status, tmp_path / "no such folder" / "clear_refs")
    assert (found.source, found.before, found.peak()) == ("resident memory of the process since its start", MIB, 2 * MIB)


def test_a_kernel_that_says_nothing_gives_no_figure(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    found = of_linux(tmp_path / "status", tmp_path / "clear_refs")
    assert (found.before, found.peak()) == (None, None)
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_a_device_that_cannot_be_asked_ends_no_run() -> None:
    found = find_memory("cuda:99")
    assert found.source is None
    assert found.peak() is None
    assert found.reason


def test_a_counter_that_fails_at_the_end_of_a_run_ends_no_run() -> None:
    def lost() -> int:
        raise RuntimeError("the device is gone")

    assert Memory("PyTorch's allocations on the GPU", None, 0, lost).peak() is None
