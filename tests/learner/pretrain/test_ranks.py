"""Several ranks of one site train like one: processes over gloo, whose step has the same micro-batches as one rank's.

Shards round the gradient's norm otherwise than one rank does, by about 1e-7 of it, and clipping scales the gradient by it.
AdamW moves a weight by lr * m / sqrt(v), so a gradient that is only rounding may move its weight by up to lr either way: all
weights must lie within 2 * lr * steps, and all but one in a thousand within 1e-5 of the largest weight.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.cli import training as pretrain
from shoal.cli.main import DONE, FAILED, main
from shoal.config import Config, ConfigError
from shoal.config.sites import PretrainSection
from shoal.diloco.agreed import Agreed
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Greeting, Welcome
from shoal.learner.pretrain.net import Net
from shoal.learner.pretrain.trainer import OuterSteps, terms_of
from shoal.learner.ranks import Ranks
from shoal.model.load import plain_model
from tests.diloco.direct import Direct
from tests.gloo import on_two_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
LR, STEPS = 3e-3, 4


@pytest.fixture(scope="module")
def config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    data, path = folder / "text.jsonl", folder / "small.toml"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(200)))
    path.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        f"steps = {STEPS}\nbatch = 4\nmicro_batch = 2\ntokens = 32\nlr = {LR}\nwarmup_steps = 2\nheldout = 6\n"
        f"checkpoint_every = 2\nshare = 5\n"
    )
    return path


def command(config: Path, out: Path, *overrides: str) -> list[str]:
    return ["pretrain", str(config), "--out", str(out), *(word for each in overrides for word in ("--set", each))]


def one(config: Path, out: Path, *overrides: str) -> int:
    return main(command(config, out, *overrides))


def two(config: Path, out: Path, *overrides: str, join: bool = False) -> list[int]:
    """The same on two ranks, as torchrun would start them. Returns their exit statuses."""
    return on_two_ranks(command(config, out, *overrides) + (["--join", "invite"] if join else []), other_weights)


def other_weights(rank: int) -> None:
    if rank:  # the leader's count
        pretrain.model_of = lambda folder, config: plain_model(folder, 7)


def checkpoint(out: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(max((out / "checkpoints").glob("step-*.safetensors")))
    return tensors


def figures(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in (name for name in one if name.startswith("model.")):
        off = (one[name] - other[name]).abs()
        assert float(off.max()) <= 2 * LR * STEPS, name
        assert float((off > 1e-5 * float(one[name].abs().max())).float().mean()) <= 1e-3, name


@pytest.fixture(scope="module")
def alone(config: Path, one_thread: None) -> Path:
    assert one(config, config.parent / "one") == DONE
    return config.parent / "one"


def test_shards_train_like_one_rank_and_any_number_of_ranks_resumes_them(
    config: Path, alone: Path, tmp_path: Path
) -> None:
    assert two(config, tmp_path / "two") == [DONE, DONE]
    check_close(checkpoint(alone), checkpoint(tmp_path / "two"))
    held = [
        [each["heldout_loss"] for each in figures(out) if "heldout_loss" in each] for out in (alone, tmp_path / "two")
    ]
    assert held[0] == pytest.approx(held[1], abs=1e-4)
    (tmp_path / "two" / "checkpoints" / f"step-{STEPS:08d}.safetensors").unlink()
    assert one(config, tmp_path / "two") == DONE  # from the checkpoint that two ranks wrote
    check_close(checkpoint(alone), checkpoint(tmp_path / "two"))


def test_what_a_meeting_agrees_on_reaches_every_rank(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "read_invite", lambda path: None)
    monkeypatch.setattr(pretrain, "_outer", alone_in_a_meeting)
    rounds = ("sites.sites=1", "sites.inner_steps=1")
    assert main([*command(config, tmp_path / "one", *rounds), "--join", "invite"]) == DONE
    assert two(config, tmp_path / "two", *rounds, join=True) == [DONE, DONE]
    check_close(checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two"))
    agreed = [[each["digest"] for each in figures(tmp_path / name) if "digest" in each] for name in ("one", "two")]
    assert len(agreed[0]) == STEPS
    assert len(agreed[1]) == STEPS


class Alone(Direct):
    """A site in a meeting of its own."""

    def join(self, greeting: Greeting) -> Welcome:
        self.meeting.about = dict(greeting.about)
        return super().join(greeting)


def alone_in_a_meeting(config: Config, net: Net, out: Path, invite: None, stop: Any) -> OuterSteps:
    terms = terms_of(config, net.tensors)
    link = Alone(Meeting(out / "meet", terms, {}, "run", lambda: Agreed.of(net.tensors, terms.shapes)), "site-0")
    return OuterSteps("site-0", config.sites, terms, link, net.tensors, out, stop.is_set)


@pytest.mark.slow
def test_what_breaks_the_training_ends_all_ranks(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert two(config, tmp_path / "lr", "pretrain.lr=1e30") == [FAILED, DONE]
    assert capfd.readouterr().err.count("lower pretrain.lr") == 1


def test_micro_batches_that_ranks_cannot_share_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 micro-batches of pretrain.micro_batch = 2, which 2 ranks cannot share"):
        Net(torch.nn.Linear(1, 1), PretrainSection(batch=9, micro_batch=2), Ranks(0, 2))
