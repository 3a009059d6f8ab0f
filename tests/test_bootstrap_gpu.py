"""Which CUDA build of PyTorch a machine gets, from what `nvidia-smi` prints, and the one sentence where it gets none."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mini_lab import bootstrap, bootstrap_gpu
from dflash_mini_lab.bootstrap import Environment, has_cuda, is_ready, lacking
from dflash_mini_lab.bootstrap_gpu import BUILDS, Driver, fitting_builds, read_driver, torch_indexes
from dflash_mini_lab.bootstrap_install import BootstrapError

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.82.07              Driver Version: 580.82.07      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""
NEWER_WORDS = "| NVIDIA-SMI 591.44   KMD Version: 591.44   CUDA UMD Version: 13.1 |"
LISTING = "NVIDIA H200, 9.0\nNVIDIA GeForce RTX 4090, 8.9\n"


def driver(cuda: tuple[int, int], capability: tuple[int, int] = (8, 6), version: str = "500.1") -> Driver:
    return Driver(version, cuda, (("A GPU", capability),))


def test_driver_cuda_and_gpus_are_read_from_what_nvidia_smi_prints() -> None:
    gpus = (("NVIDIA H200", (9, 0)), ("NVIDIA GeForce RTX 4090", (8, 9)))
    assert read_driver(SUMMARY, LISTING) == Driver("580.82.07", (13, 0), gpus)
    assert read_driver(NEWER_WORDS, LISTING).cuda == (13, 1)


@pytest.mark.parametrize(
    ("summary", "listing", "sentence"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", "finds no usable GPU"),
        ("No devices were found", "No devices were found", "No devices were found"),
        ("", "", "it said nothing"),
        (SUMMARY, "\n", "lists no GPU"),
    ],
)
def test_a_driver_without_a_gpu_is_one_sentence_that_names_the_cpu_command(summary: str, listing: str, sentence: str) -> None:
    with pytest.raises(BootstrapError) as caught:
        read_driver(summary, listing)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert message.endswith("python run_cpu.py measures on the CPU.")


@pytest.mark.parametrize(
    ("cuda", "capability", "builds"),
    [
        ((13, 0), (9, 0), ["cu130", "cu128", "cu126"]),
        ((13, 2), (12, 0), ["cu130", "cu128"]),
        ((13, 0), (6, 1), ["cu126"]),
        ((13, 4), (13, 0), ["cu130"]),
        ((12, 9), (8, 6), ["cu128", "cu126"]),
        ((12, 0), (7, 0), ["cu126"]),
    ],
)
def test_the_builds_that_run_on_driver_and_gpu_come_best_first(
    cuda: tuple[int, int], capability: tuple[int, int], builds: list[str]
) -> None:
    assert fitting_builds(driver(cuda, capability)) == builds
    assert torch_indexes(driver(cuda, capability)).split() == [f"https://download.pytorch.org/whl/{name}" for name in builds]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (driver((11, 8)), "500.1 is too old: it runs CUDA 11.8, and PyTorch's builds need 12.0"),
        (Driver("418.1", (10, 1), ()), "418.1 is too old"),
        (driver((13, 0), (3, 7)), "A GPU has compute capability 3.7, and PyTorch's builds need 5.0 or newer"),
        (driver((12, 8), (13, 0)), "too old for A GPU: it runs CUDA 12.8, and PyTorch's build for this GPU needs 13.0"),
    ],
)
def test_a_driver_or_gpu_that_no_build_serves_is_one_sentence_with_both_versions(found: Driver, sentence: str) -> None:
    with pytest.raises(BootstrapError, match=sentence):
        fitting_builds(found)


def test_the_guide_s_table_is_the_lab_s() -> None:
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for build in BUILDS:
        newest = "…" if build.newest[0] > 90 else f"… {build.newest[0]}.{build.newest[1]}"
        oldest = f"{build.oldest[0]}.{build.oldest[1]}"
        assert f"| `{build.name}` | {build.driver[0]}.{build.driver[1]} | {oldest} {newest} |" in guide


def test_without_nvidia_smi_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_gpu.shutil, "which", lambda name: None)
    with pytest.raises(BootstrapError, match="there is no NVIDIA driver here"):
        bootstrap_gpu.find_driver()


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")
def test_a_program_that_answers_is_asked_for_summary_and_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ $# = 0 ]; then cat <<'E'\n{SUMMARY}\nE\nelse printf 'A GPU, 9.0\\n'; fi\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert bootstrap_gpu.find_driver() == Driver("580.82.07", (13, 0), (("A GPU", (9, 0)),))


@pytest.mark.skipif(sys.platform != "linux", reason="an empty PATH hides nvidia-smi here only")
def test_on_a_machine_without_a_driver_nothing_is_installed_and_the_status_is_2(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LFM_", "GPU_", "DFLASH_"))}
    code = (
        "import sys, runpy; sys.argv = ['run_gpu.py', '--check-only']\n"
        f"runpy.run_path({str(ROOT / 'run_gpu.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(  # -S: no site-packages, so an environment would have to be made
        [sys.executable, "-S", "-c", code], env={**environ, "PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no NVIDIA driver here")
    assert done.stderr.count("\n") == 1


# The environment of its own.


@pytest.mark.parametrize(
    ("version", "platform", "answer"),
    [
        ("2.13.0+cu130", "linux", True),
        ("2.13.0+cu126", "win32", True),
        ("2.13.0+cpu", "linux", False),
        ("2.13.0+rocm6.4", "linux", False),
        ("2.13.0", "linux", True),
        ("2.13.0", "win32", False),
        ("2.13.0", "darwin", False),
    ],
)
def test_whether_a_torch_is_built_for_cuda_is_read_from_its_version(version: str, platform: str, answer: bool) -> None:
    assert has_cuda(version, platform) is answer


def test_a_cpu_build_meets_the_pin_but_not_the_gpu_s_environment(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==99.1\n")
    requirements = (tmp_path / "requirements.txt",)
    for cuda, build, lacks in ((False, "+cpu", []), (True, "+cpu", ["torch==99.1 built for CUDA"]), (True, "+cu130", [])):
        environment = Environment(tmp_path, requirements, cuda)
        assert environment.folder.name == (".venv-gpu" if cuda else ".venv")
        environment.python.parent.mkdir(parents=True, exist_ok=True)
        environment.python.touch()
        site = environment.folder / "lib" / "python3" / "site-packages"
        for old in site.glob("*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = site / f"torch-99.1{build}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: 99.1{build}\n")
        assert lacking(environment, environment.site_packages) == lacks
        assert is_ready(environment) is (not lacks)


def test_the_variable_beats_the_index_that_fits_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_TORCH_INDEX", raising=False)
    assert bootstrap.chosen_index(lambda: "https://one https://two") == "https://one https://two"
    monkeypatch.setenv("DFLASH_TORCH_INDEX", "")
    assert bootstrap.chosen_index("https://one") == ""
