"""What the learner says of its settings when it starts, and how often it writes checkpoints by default."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from shoal.config import parse
from shoal.config.recipe import LearnerSection
from shoal.learner import footprint
from shoal.learner.ranks import Ranks

from .support import make_policy


@pytest.mark.parametrize(
    ("billions", "steps", "every"),
    [(0.135, None, 1), (0.83, None, 1), (7.6, None, 10), (32.8, None, 40), (32.8, 1, 1), (0.135, 8, 8)],
)
def test_checkpoints_write_ten_gigabytes_a_step_or_less(billions: float, steps: int | None, every: int) -> None:
    section = LearnerSection() if steps is None else LearnerSection(checkpoint_every=steps)
    assert section.steps_between_checkpoints(round(billions * 1e9)) == every


def sevenB(max_tokens: int = 8192, device: str = "cpu", ranks: int = 8, **learner: Any) -> list[str]:
    """What is said of a model of the size of Qwen2.5-7B."""
    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    model = SimpleNamespace(config=LlamaConfig(**sizes, tie_word_embeddings=False))
    policy: Any = SimpleNamespace(
        model=model,
        ranks=Ranks(0, ranks),
        compute=torch.bfloat16,
        device=torch.device(device),
        offloads=learner.get("offload", False),
        trained=7_615_616_512,
    )
    settings = {"model": {"device": device}, "learner": {"loss": {"beta": 0.0}} | learner}
    return footprint.lines(parse(settings | {"sampling": {"max_tokens": max_tokens}}), policy)


def test_what_fits_is_said_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_bytes", lambda _: 80e9)
    parameters, checkpoints, memory = sevenB(activation_checkpointing=True)
    assert parameters == "7,616 million trained parameters on 8 rank(s), nothing on the host"
    assert checkpoints.startswith(
        "a checkpoint every 10 step(s) of up to 91.4 GB (by size; set learner.checkpoint_every"
    )
    found = re.fullmatch(
        r"up to (\S+) of 80.0 GB with a full row of learner.row_tokens = 40960, .* recomputed .*", memory
    )
    assert found and float(found[1]) == pytest.approx(42.8, abs=0.5), "arithmetic of learner_memory.py, and a process"


def test_what_does_not_fit_is_said_with_the_settings_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_bytes", lambda _: 80e9)
    *_, advice = sevenB()
    assert advice.endswith(", or learner.row_tokens = 40960 and learner.activation_checkpointing = true")
    smaller = re.search(r"set learner.row_tokens = (\d+), or", advice)
    assert smaller and 0 < int(smaller[1]) < 40960
    assert "will not fit" not in " ".join(sevenB(row_tokens=int(smaller[1])))
    assert "will not fit" in sevenB(row_tokens=int(smaller[1]) + 1024)[-1]
    long = sevenB(max_tokens=32768)[-1]
    assert long == "full rows will not fit: set learner.row_tokens = 40960 and learner.activation_checkpointing = true"
    monkeypatch.setattr(footprint, "available_bytes", lambda _: 1e9)
    assert sevenB()[-1] == "no row fits: use more ranks"


def test_offloading_is_said_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_bytes", lambda device: 80e9 if device.type == "cuda" else 2e12)
    *_, memory, offer = sevenB(device="cuda", activation_checkpointing=True)
    offloaded, _, less, host = sevenB(device="cuda", activation_checkpointing=True, offload=True)
    assert offloaded.endswith("on 8 rank(s), masters, moments and summed gradients on the host")
    assert host == "15.2 GB of the host's 2000.0 GB a rank, for each rank on it", "16 bytes a parameter, over the ranks"
    assert offer == f"{less.split()[2]} GB, and 15.2 GB of the host, with learner.offload = true"
    gigabytes = [float(said.split()[2]) for said in (memory, less)]
    assert gigabytes[0] - gigabytes[1] == pytest.approx(15.2, abs=0.11)


def test_offloading_is_advised_where_it_makes_longer_rows_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_bytes", lambda device: 80e9)
    alone = sevenB(max_tokens=2048, ranks=1, device="cuda")[-1]  # masters and moments alone take 91 GB
    found = re.fullmatch(
        r"full rows will not fit: set learner.row_tokens = (\d+) and learner.offload = true, or "
        r"learner.row_tokens = (\d+) and learner.activation_checkpointing = true and learner.offload = true",
        alone,
    )
    assert found and 2048 < int(found[1]) < int(found[2]) == 40960
    assert "will not fit" not in " ".join(
        sevenB(max_tokens=2048, ranks=1, device="cuda", offload=True, row_tokens=int(found[1]))
    )
    assert sevenB(max_tokens=2048, ranks=1)[-1] == "no row fits: use more ranks", "a CPU has nowhere to offload to"
    eight = sevenB(device="cuda")[-1]
    assert "= 40960 and learner.activation_checkpointing = true, or" in eight, "which is enough"
    assert eight.endswith("and learner.offload = true") and eight.count("activation_checkpointing") == 1


def test_smaller_moments_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_bytes", lambda _: 80e9)
    sizes = [float(sevenB(activation_checkpointing=True, optimizer=of)[2].split()[2]) for of in ("adamw", "adamw_8bit")]
    assert sizes[0] - sizes[1] == pytest.approx(6 * 6.5 / 8, abs=0.1), "6 bytes of 6.5 billion entries on 8 devices"


def test_of_a_real_policy_all_is_said(tiny_folder: Path) -> None:
    said = footprint.lines(parse({"learner": {"checkpoint_every": 3}}), make_policy(tiny_folder))
    assert len(said) == 3 and "every 3 step(s) of up to 0.0 GB (learner.checkpoint_every), 2 kept" in said[1]
