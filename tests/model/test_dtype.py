"""The compute dtype is the configured dtype. With "auto" it is the dtype that was measured to be faster."""

import pytest
import torch

from shoal.model import dtype


def speeds(monkeypatch: pytest.MonkeyPatch, **gflops: float) -> None:
    monkeypatch.setattr(dtype, "measure_gflops", lambda kind, device="cpu": gflops[str(kind).removeprefix("torch.")])


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_named_dtype_is_used_without_measuring(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    speeds(monkeypatch)  # measuring would raise KeyError
    assert dtype.pick(name) == (name, {})


@pytest.mark.parametrize("name", ["float16", "fp32", "", "Auto"])
def test_the_error_for_an_unknown_dtype_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown dtype '{name}'"):
        dtype.pick(name)


@pytest.mark.parametrize(
    ("bfloat16", "winner"), [(1.0, "float32"), (119.0, "float32"), (121.0, "bfloat16"), (850.0, "bfloat16")]
)
def test_auto_picks_bfloat16_only_where_it_is_faster_by_a_fifth_and_returns_the_speeds(
    monkeypatch: pytest.MonkeyPatch, bfloat16: float, winner: str
) -> None:
    speeds(monkeypatch, float32=100.0, bfloat16=bfloat16)
    assert dtype.pick("auto") == (winner, {"float32": 100.0, "bfloat16": bfloat16})


def test_the_measured_speed_of_this_machine_is_a_plausible_number() -> None:
    assert 0.1 < dtype.measure_gflops(torch.float32) < 1e6


@pytest.mark.parametrize(("device", "size"), [("cpu", 512), ("meta", 4096)])
def test_a_gpus_speed_is_measured_with_a_product_that_fills_it(
    monkeypatch: pytest.MonkeyPatch, device: str, size: int
) -> None:
    """The meta device stands for a GPU: it computes nothing."""
    shapes = []
    monkeypatch.setattr(torch, "matmul", lambda a, b: shapes.append((a.shape, b.shape)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    dtype.measure_gflops(torch.bfloat16, device)
    assert set(shapes) == {((size, size), (size, size))}


@pytest.mark.parametrize(
    ("device", "best_s", "products"),
    [("cpu", 1.0, ["cpu"]), ("meta", 0.01, ["meta", "wait for meta"] * (1 + dtype.REPEATS))],
)
def test_a_gpus_slow_first_product_is_not_timed_and_a_slow_cpu_computes_only_one(
    monkeypatch: pytest.MonkeyPatch, device: str, best_s: float, products: list[str]
) -> None:
    calls: list[str] = []
    now_s = 0.0

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal now_s
        now_s += 0.01 if calls else 1.0
        calls.append(a.device.type)

    monkeypatch.setattr(torch, "matmul", multiply)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    size = dtype.SIZE if device == "cpu" else dtype.DEVICE_SIZE
    assert dtype.measure_gflops(torch.bfloat16, device) == pytest.approx(2 * size**3 / best_s / 1e9)
    assert calls == products
