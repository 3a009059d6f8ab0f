"""Our own product: right for every shape, the same bits at every row count, and left alone where the machine cannot run it."""
from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_mini_lab import packed_linear, prefetched_linear
from dflash_mini_lab.packed_linear import PREFETCHED, measure_plan, storage_works
from dflash_mini_lab.prefetched_linear import NARROW, WIDE, Kernel, PackedWeight, in_bytes, kernel, most_of_an_input

pytestmark = pytest.mark.skipif(kernel() is None, reason="no LLVM, fused multiply-add or OpenMP here")


@pytest.fixture(scope="module", params=[WIDE, NARROW], ids=["AVX-512", "other"])
def product(request: pytest.FixtureRequest) -> Kernel:
    import llvmlite.binding as llvm

    return Kernel(llvm, ctypes.CDLL(None), *request.param)


def problem(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 7), (32, 64), (96, 576), (100, 40), (576, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_product_for_any_shape_and_row_count(product: Kernel, outputs: int, inputs: int, bias: bool) -> None:
    x, weight, b = problem(27, outputs, inputs)
    packed = product.pack(weight)
    for rows in (1, 2, 6, 7, 12, 13, 27):
        found = product.product(x[None, :rows], packed, b if bias else None)
        wanted = x[:rows].double() @ weight.double().T + (b.double() if bias else 0)
        assert found.is_contiguous()
        torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=1e-6 * inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_is_kept_in_them_and_loses_nothing(product: Kernel, dtype: torch.dtype) -> None:
    x, weight, _ = problem(27, 100, 600)
    weight = weight.to(dtype).float()
    packed = product.pack(weight)
    assert packed[0].dtype == dtype
    assert packed[0].data_ptr() % prefetched_linear.CACHE_LINE == 0
    for rows in (1, 6, 13, 27):
        wanted = x[:rows].double() @ weight.double().T
        torch.testing.assert_close(product.product(x[:rows], packed, None).double(), wanted, rtol=0, atol=1e-4)


def test_a_weight_is_kept_in_float32_where_16_bits_would_lose_anything(product: Kernel) -> None:
    weight = torch.ones(40, 8)
    assert product.pack(weight)[0].dtype == torch.bfloat16
    weight[3, 5] = 1 + 2.0**-10
    assert product.pack(weight)[0].dtype == torch.float16
    weight[3, 6] = 1 + 2.0**-20
    assert product.pack(weight)[0].dtype == torch.float32


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 8), (96, 576), (100, 40), (70, 1536), (16, 9000)])
@pytest.mark.parametrize("bias", [False, True])
def test_in_8_bits_it_is_the_product_of_what_is_rounded(product: Kernel, outputs: int, inputs: int, bias: bool) -> None:
    x, weight, b = problem(27, outputs, inputs)
    x[2], x[3], x[4, 0], weight[0] = 0, x[3] * 1e-30, 50, weight[0] * 1e6
    packed = product.pack_bytes(weight)
    assert (packed.tiles.dtype, packed.inputs, packed.outputs) == (torch.int8, inputs, outputs)
    assert packed.tiles.data_ptr() % prefetched_linear.CACHE_LINE == 0
    whole, scales = in_bytes(weight)
    steps = x.abs().amax(1, keepdim=True).double().clamp_min(1e-45) / most_of_an_input(inputs)
    numbers = (x.double() / steps).round()
    wanted = numbers @ whole.double().T * steps * scales.double()
    size = numbers.abs() @ whole.double().abs().T * steps * scales.double()
    nearly = steps * scales.double() * 127  # a number between two may be rounded to either
    for rows in (1, 2, 6, 7, 12, 13, 27):
        found = product.product(x[None, :rows], packed, b if bias else None)[0].double() - (b.double() if bias else 0)
        assert ((found - wanted[:rows]).abs() <= 1e-6 * (size + 8)[:rows] + 2 * nearly[:rows]).all()


def test_the_largest_sums_of_8_bits_fit(product: Kernel) -> None:
    for inputs in (2, 576, 3000, 40_000):
        weight, x = torch.full((3, inputs), -1.0), torch.full((1, inputs), 2.0)
        found = product.product(x, product.pack_bytes(weight), None)
        torch.testing.assert_close(found, torch.full((1, 3), -2.0 * inputs), rtol=1e-6, atol=0)


def test_rounding_to_8_bits_is_by_row_and_takes_any_size() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -127.0], [1e-40, 0.0], [3e38, -3e38]])
    whole, scales = in_bytes(weight)
    assert whole.tolist()[:2] == [[0, 0], [1, -127]]
    torch.testing.assert_close(whole * scales[:, None], weight, rtol=0.004, atol=1e-38)


@pytest.mark.parametrize("pack", [Kernel.pack, Kernel.pack_bytes])
def test_a_row_has_the_same_bits_alone_and_among_others(product: Kernel, pack: Callable[..., PackedWeight]) -> None:
    x, weight, _ = problem(27, 576, 1536)
    packed = pack(product, weight)
    together = product.product(x, packed, None)
    for rows in range(1, 27):
        assert torch.equal(product.product(x[:rows].contiguous(), packed, None), together[:rows])
    alone = torch.cat([product.product(row[None], packed, None) for row in x])
    assert torch.equal(alone, together)


def test_inputs_that_do_not_lie_together_are_read_as_they_are(product: Kernel) -> None:
    x, weight, _ = problem(8, 64, 48)
    wide = torch.stack([x, -x], dim=1)
    assert torch.equal(product.product(wide[:, 1], product.pack(weight), None), product.product(-x, product.pack(weight), None))


@pytest.mark.parametrize("pack", [Kernel.pack, Kernel.pack_bytes])
def test_more_threads_than_tiles_and_one_thread_give_the_same(product: Kernel, pack: Callable[..., PackedWeight]) -> None:
    x, weight, _ = problem(3, 70, 48)
    packed, threads = pack(product, weight), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(product.product(x, packed, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_it_is_offered_in_float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert storage_works(PREFETCHED, torch.float32, cpu)
    assert not storage_works(PREFETCHED, torch.bfloat16, cpu)
    monkeypatch.setattr(packed_linear, "kernel", lambda: None)
    assert not storage_works(PREFETCHED, torch.float32, cpu)
    assert measure_plan([torch.randn(64, 32)], repeats=1).storage != PREFETCHED


def test_a_machine_without_openmp_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert prefetched_linear.kernel.__wrapped__() is None


def test_a_packed_weight_lies_on_cache_lines(product: Kernel) -> None:
    for outputs in (16, 64, 100):
        packed = product.pack(torch.randn(outputs, 9))
        assert packed.tiles.data_ptr() % prefetched_linear.CACHE_LINE == 0
        assert packed.outputs == outputs


