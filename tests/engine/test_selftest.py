"""The self-test passes only if results do not depend on the shapes of tensors."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine import selftest
from shoal.engine.selftest import fingerprint, fixed_tokens
from shoal.model import exact
from shoal.model.load import load_model
from shoal.model.products import OrderError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    return load_model(tiny_folder, "float32", "cpu", "exact")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def depend_on_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attention's result depend on the number of rows, as it does where the order of summation depends on it."""
    attention = exact.attention

    def by_shape(query: Any, key: Any, value: Any, mask: Any, *more: Any) -> Any:
        output, sums = attention(query, key, value, mask, *more)
        return output * (1 + 2**-20 * (len(query) % 3)), sums

    monkeypatch.setattr(exact, "attention", by_shape)


def test_exact_numerics_pass_and_arithmetic_that_depends_on_shapes_fails(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selftest.disagreements(model, "float32", "cpu") == []
    depend_on_shape(monkeypatch)
    assert selftest.disagreements(model, "float32", "cpu") and not selftest.passes(model, "float32", "cpu")


def test_a_cached_result_is_used_only_for_the_same_model_and_environment_and_library(
    model: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = load_model(shutil.copytree(tiny_folder, tmp_path / "elsewhere"), "float32", "cpu", "exact")
    assert selftest.passes(model, "float32", "cpu")
    monkeypatch.setattr(selftest, "disagreements", lambda *_: ["measured again"])
    assert selftest.passes(model, "float32", "cpu"), "the recorded result must be used"
    assert selftest.passes(elsewhere, "float32", "cpu"), "the same model in another folder must not be measured again"
    elsewhere.config.num_attention_heads += 1
    assert not selftest.passes(elsewhere, "float32", "cpu"), "another model's result was used"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert selftest.passes(model, "float32", "cpu"), "a new number of threads must not cause a measurement"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not selftest.passes(model, "float32", "cpu"), "a result of other kernels was used"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not selftest.passes(model, "float32", "cpu"), "a result of an older library was used"


def test_a_product_that_cannot_be_exact_on_some_number_of_threads_fails_the_self_test(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> list[str]:
        raise OrderError("float32 products of depth 64 on 3 threads do not have the same bits each time")

    monkeypatch.setattr(selftest, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(selftest, "disagreements", refuse)
    assert not selftest.passes(model, "float32", "cpu")


def test_a_fingerprint_changes_with_dtype_order_and_library(
    model: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(model)
    assert before == fingerprint(load_model(tiny_folder, "float32", "cpu", "exact"))
    assert before != fingerprint(load_model(tiny_folder, "bfloat16", "cpu", "exact")), (
        "the fingerprint must depend on the dtype"
    )
    assert before != fingerprint(load_model(tiny_folder, "float32", "cpu", "fast")), (
        "the fingerprint must depend on the order of sums"
    )
    depend_on_shape(monkeypatch)
    assert before != fingerprint(model), "the fingerprint must depend on the library's arithmetic"


def test_processes_that_start_together_measure_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, both = [], threading.Event()

    def measure(*_: Any) -> list[str]:
        measuring.append(1)
        if len(measuring) == 2:
            both.set()
        both.wait(0.3)
        return []

    monkeypatch.setattr(selftest, "disagreements", measure)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: selftest.passes(model, "float32", "cpu"), range(2)))
    assert len(measuring) == 1


def test_fixed_tokens_depend_only_on_the_arguments_and_are_in_the_vocabulary() -> None:
    assert fixed_tokens("prompt", 5, 64) == fixed_tokens("prompt", 5, 64)
    assert fixed_tokens("prompt", 64, 50) != fixed_tokens("branch 0", 64, 50)
    assert all(0 <= token < 50 for token in fixed_tokens("prompt", 500, 50))
