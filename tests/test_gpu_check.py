"""What a GPU run says before it starts, and each reason against it in one sentence; all of it on machines without a GPU."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_mini_lab import cli
from dflash_mini_lab.measurement.gpu import (
    GIB,
    Cuda,
    Gpu,
    checked_product,
    lines,
    look,
    memory_refusal,
    needed_bytes,
    refusal,
    serves,
    sum_in_float32,
)
from dflash_mini_lab.settings import GPU
from dflash_mini_lab.types import UserError

H200 = Gpu("NVIDIA H200", 140 * GIB, 138 * GIB, (9, 0))
WHOLE = Cuda("2.13.0+cu130", "13.0", 92000, "580.82.07", (H200,), ("sm_75", "sm_80", "sm_90"), None)


def test_what_was_found_is_said_with_every_version() -> None:
    assert lines(WHOLE) == [
        "GPU 0: NVIDIA H200, 140.0 GiB (138.0 free), compute capability 9.0",
        "NVIDIA driver 580.82.07; PyTorch 2.13.0+cu130 (CUDA 13.0, cuDNN 92000)",
    ]
    assert refusal(WHOLE) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"build": None, "torch": "2.13.0+cpu"}, r"this PyTorch \(2.13.0\+cpu\) is built without CUDA"),
        ({"gpus": ()}, "PyTorch finds no CUDA GPU here"),
        ({"gpus": (), "problem": "No CUDA GPUs are available"}, r"finds no CUDA GPU here \(No CUDA GPUs are available\)"),
        (
            {"gpus": (), "problem": "The NVIDIA driver on your system is too old (found version 11040)."},
            "driver 580.82.07 is too old for this PyTorch's CUDA 13.0",
        ),
        ({"gpus": (replace(H200, capability=(7, 0)),)}, r"NVIDIA H200 has compute capability 7.0, .* \(sm_75, sm_80, sm_90\)"),
    ],
)
def test_every_reason_against_a_run_is_one_sentence(change: dict, sentence: str) -> None:
    reason = refusal(replace(WHOLE, **change))
    assert reason is not None
    with pytest.raises(UserError, match=sentence):
        raise UserError(reason)
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("architectures", "capability", "answer"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100", "compute_120"), (12, 1), True),
        (("sm_120",), (10, 0), False),
        ((), (9, 0), True),
    ],
)
def test_kernels_run_within_their_major_version_and_portable_code_on_what_is_newer(
    architectures: tuple[str, ...], capability: tuple[int, int], answer: bool
) -> None:
    assert serves(architectures, capability) is answer


def test_too_little_memory_is_known_before_weights_are_read() -> None:
    needed = needed_bytes(350_000_000, "float16")
    assert needed == 4 * 350_000_000 + GIB
    assert needed_bytes(350_000_000, "float32") - GIB == 2 * (needed - GIB)
    assert memory_refusal("lfm2.5-350m", needed, needed) is None
    reason = memory_refusal("lfm2.5-350m", needed, GIB)
    assert reason is not None
    assert reason.startswith("lfm2.5-350m needs about 2.3 GiB of GPU memory and 1.0 GiB are free")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_right_product_is_told_and_a_wrong_one_refused(dtype: str) -> None:
    assert checked_product("cpu", dtype).startswith(f"A {dtype} product of 512 × 512 × 512 agrees with float64")

    def one_element_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        product[3, 5] += 20.0
        return product

    with pytest.raises(UserError, match=f"a {dtype} product on cpu is wrong: off by"):
        checked_product("cpu", dtype, one_element_wrong)
    with pytest.raises(UserError, match="is wrong"):
        checked_product("cpu", dtype, lambda a, b: (a @ b) * float("nan"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("argv", [["--check-only"], ["--methods", "00"], ["--download-only"]])
def test_without_a_gpu_nothing_runs_on_the_cpu_instead(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*argv, "--no-bootstrap"], GPU) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert "Target:" not in said.out
    assert f"PyTorch {torch.__version__}" in said.out


def test_looking_never_fails() -> None:
    assert look().torch == torch.__version__


def test_every_product_sums_in_float32() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    reduced = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    flags = [*((matmul, name) for name in reduced), (cudnn, "allow_tf32")]
    earlier = [getattr(place, name) for place, name in flags]
    try:
        for place, name in flags:
            setattr(place, name, True)
        sum_in_float32()
        assert [getattr(place, name) for place, name in flags] == [False] * 4
    finally:
        for (place, name), value in zip(flags, earlier, strict=True):
            setattr(place, name, value)
