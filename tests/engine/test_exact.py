"""Decoding gives the same bits as a prefill, in any batch, with any number of threads and in any process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model import exact as exact_attention
from shoal.model.dtype import DtypeName
from shoal.model.tree import Tree

from ..model.exactness import DTYPES, EACH, exact_model, skip_unless_exact, states
from .support import PROMPTS, SEEDS, Groups

pytestmark = pytest.mark.usefixtures("one_thread")
SOME_END = Sampling(temperature=0.9, max_tokens=70, eos_ids=(1, 7, 20, 33, 50))


def engine_for(architecture: str, folder: Path, dtype: DtypeName) -> TorchEngine:
    engine = TorchEngine(dtype, "cpu", "exact")
    engine.model = exact_model(architecture, folder, dtype)
    return engine


def assert_replayed(model: Any, prompts: Sequence[Sequence[int]], groups: Groups, temperature: float) -> None:
    """Compare every hidden state and logprob with a prefill of all completions."""
    trees = [
        Tree(prompt, [c.tokens for c in group], [c.turns for c in group] if any(c.turns for c in group) else ())
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    hidden_NH, logp_N = states(model, trees, temperature)
    flat = [completion for group in groups for completion in group]
    assert torch.equal(hidden_NH.bfloat16(), torch.cat([completion.hidden_TH for completion in flat]))
    assert logp_N.tolist() == [logprob for completion in flat for logprob in completion.logprobs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", EACH)
def test_decoding_has_the_bits_of_one_prefill(architecture: str, dtype: DtypeName, tmp_path: Path) -> None:
    """Rows of different lengths end at different times, and the cache grows."""
    engine = engine_for(architecture, tmp_path, dtype)
    groups = engine.generate(PROMPTS, SEEDS, SOME_END)
    assert len({len(c.tokens) for group in groups for c in group}) > 3
    assert_replayed(engine.model, PROMPTS, groups, SOME_END.temperature)


def test_with_an_environments_replies_decoding_still_has_the_bits_of_a_prefill(tmp_path: Path) -> None:
    engine = engine_for("grouped heads", tmp_path, "float32")

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return [60 + group, 61, 62] if len(turns) < 4 and len(tokens) < 40 else None

    groups = engine.generate(PROMPTS, SEEDS, SOME_END, respond)
    assert sum(len(c.turns) > 0 for group in groups for c in group) > 3
    assert_replayed(engine.model, PROMPTS, groups, SOME_END.temperature)


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    engine = engine_for("wide", tmp_path, "bfloat16")
    few = Sampling(temperature=1.0, max_tokens=6, eos_ids=())
    one = engine.generate(PROMPTS, SEEDS, few)
    torch.set_num_threads(2)
    two = engine.generate(PROMPTS, SEEDS, few)
    assert [c.logprobs for group in one for c in group] == [c.logprobs for group in two for c in group]


COMPUTED = """
import hashlib, os, sys
import torch
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.selftest import fingerprint

folder, dtype, threads, cores = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
torch.set_num_threads(threads)
engine = TorchEngine(dtype, "cpu", "exact")
engine.load(folder)
groups = engine.generate([[5, 9, 3], [4] * 40], [[1, 2, 3], [4, 5]], Sampling(1.0, 24, (1,)))
flat = [completion for group in groups for completion in group]
digest = hashlib.sha256(repr([(completion.tokens, completion.logprobs) for completion in flat]).encode())
digest.update(torch.cat([completion.hidden_TH for completion in flat]).view(torch.int16).numpy().tobytes())
print(fingerprint(engine.model), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_cores_and_load_change_no_bit_of_a_process(tiny_folder: Path, dtype: DtypeName) -> None:
    """Compare a process with two threads on an idle machine, and two with one thread on a busy machine.

    Of the latter two, one is bound to a core and one is not.
    """
    skip_unless_exact(dtype)

    def computed(threads: int, cores: str) -> str:
        argv = [sys.executable, "-c", COMPUTED, str(tiny_folder), dtype, str(threads), cores]
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=600).stdout

    expected = computed(2, "")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert computed(1, "one") == computed(1, "") == expected
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("mutant", ["another tile", "keys backwards"])
def test_the_comparison_with_a_prefill_fails_if_decoding_sums_in_another_order(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for("wide", tmp_path, "float32")
    sampling = Sampling(temperature=1.0, max_tokens=20, eos_ids=())
    plain, summed = exact_attention.Step.attend, exact_attention.weighted_sum_

    def backwards_(output: Tensor, weights: Tensor, value: Tensor) -> None:
        summed(output, weights.flip(-1), value.flip(1))

    def attend(*arguments: Any) -> Tensor:
        with monkeypatch.context() as inner:
            if mutant == "another tile":
                inner.setattr(exact_attention, "tile", lambda: 16)
            else:
                inner.setattr(exact_attention, "weighted_sum_", backwards_)
            return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(exact_attention.Step, "attend", attend)
        groups = engine.generate(PROMPTS, SEEDS, sampling)
    with pytest.raises(AssertionError):
        assert_replayed(engine.model, PROMPTS, groups, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_decoding_has_the_bits_of_one_prefill(bundled: Path, dtype: DtypeName) -> None:
    skip_unless_exact(dtype)
    engine = TorchEngine(dtype, "cpu", "exact")
    engine.load(bundled)
    draw = torch.Generator().manual_seed(0)
    vocabulary = engine.model.config.vocab_size
    for round_ in range(3):
        torch.set_num_threads(1 + round_ % 2)
        lengths = torch.randint(1, 300, (4,), generator=draw).tolist()
        prompts = [torch.randint(5, vocabulary, (n,), generator=draw).tolist() for n in lengths]
        seeds = [[1000 * round_ + 10 * g + i for i in range(1 + 3 * g)] for g in range(4)]
        ends = tuple(torch.randint(vocabulary, (vocabulary // 60,), generator=draw).tolist())
        groups = engine.generate(prompts, seeds, Sampling(1.0, 100, ends))
        assert_replayed(engine.model, prompts, groups, 1.0)
