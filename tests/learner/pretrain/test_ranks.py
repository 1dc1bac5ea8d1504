"""Two ranks of one site train as one rank does. The ranks are real processes that communicate over gloo.

One and two ranks compute the same micro-batches, but round the gradient's norm differently. Clipping scales the gradient
by the norm. AdamW moves a weight by lr * m / sqrt(v). So if a gradient is only rounding error, its weight may move by up
to lr in either direction.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from shoal.cli import training as pretrain
from shoal.cli.main import DONE, FAILED, main
from shoal.diloco import messages, remote
from shoal.diloco.agreed import Agreed
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Greeting, Terms, Welcome
from shoal.learner import ranks
from shoal.model.load import load_model
from tests.diloco.support import Direct
from tests.gloo import on_two_ranks
from tests.learner.sft.test_ranks import check_close

pytestmark = pytest.mark.usefixtures("one_thread")
LR, STEPS = 3e-3, 4
MOVED = 2 * LR * STEPS


@pytest.fixture(scope="module")
def config(tiny_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    data, path = folder / "text.jsonl", folder / "small.toml"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(200)))
    path.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        f"steps = {STEPS}\nbatch = 4\nmicro_batch = 2\ntokens = 32\nlr = {LR}\nwarmup_steps = 2\nheldout = 6\n"
        f"checkpoint_every = 2\n"
    )
    return path


def command(config: Path, out: Path, *overrides: str) -> list[str]:
    return ["pretrain", str(config), "--out", str(out), *(word for each in overrides for word in ("--set", each))]


def figures(out: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def alone(config, one_thread) -> Path:
    assert main(command(config, config.parent / "one")) == DONE
    return config.parent / "one"


def test_two_ranks_train_as_one_does_and_one_rank_resumes_their_run(config, alone, tmp_path):
    out = tmp_path / "two"
    assert on_two_ranks(command(config, out)) == [DONE, DONE]
    check_close(alone, out, MOVED)
    assert figures(alone, "heldout_loss") == pytest.approx(figures(out, "heldout_loss"), abs=1e-3)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:06d}")
    shutil.rmtree(out / "model")
    assert main(command(config, out)) == DONE  # it continues from the checkpoint that two ranks wrote
    check_close(alone, out, MOVED)
    # A step has only one micro-batch, so one rank idles.
    assert on_two_ranks(command(config, tmp_path / "idle", "pretrain.micro_batch=4")) == [DONE, DONE]
    check_close(alone, tmp_path / "idle", MOVED)


class Alone(Direct):
    """A link to a meeting of one site, in the site's process."""

    def __init__(self, invite: None, folder: Path, terms: Terms, **_: object) -> None:
        model = load_model(self.model, seed=0)
        tensors = {name: 0.5 * each.detach() for name, each in model.named_parameters()}  # not the site's weights
        super().__init__(Meeting(folder / "meet", terms, {}, "run", lambda: Agreed.of(tensors, terms.shapes)), "site-0")

    model: Path

    def join(self, greeting: Greeting) -> Welcome:
        self.meeting.about = dict(greeting.about)
        return super().join(greeting)


def join_alone(model: Path, patch: pytest.MonkeyPatch | None = None) -> None:
    patch = patch or pytest.MonkeyPatch()  # in a rank's process
    patch.setattr(pretrain, "read_invite", lambda path: path)
    patch.setattr(messages, "name_of", lambda invite: "site-0")
    patch.setattr(Alone, "model", model, raising=False)
    patch.setattr(remote, "Remote", Alone)


def test_the_agreed_state_reaches_every_rank(config, tiny_folder, tmp_path, monkeypatch):
    words = ("sites.sites=1", "sites.inner_steps=1")
    join_alone(tiny_folder, monkeypatch)
    assert main([*command(config, tmp_path / "one", *words), "--join", "invite"]) == DONE
    two = [*command(config, tmp_path / "two", *words), "--join", "invite"]
    assert on_two_ranks(two, partial(join_alone, tiny_folder)) == [DONE, DONE]
    check_close(tmp_path / "one", tmp_path / "two", MOVED)
    assert len(figures(tmp_path / "one", "digest")) == len(figures(tmp_path / "two", "digest")) == STEPS


def wait_a_minute() -> None:
    ranks.RANKS_TIMEOUT_S = 60.0


@pytest.mark.slow
def test_a_diverged_update_ends_all_ranks(config, tmp_path, capfd):
    assert on_two_ranks(command(config, tmp_path / "lr", "pretrain.lr=1e30"), wait_a_minute) == [FAILED, FAILED]
    assert "lower the learning rate" in capfd.readouterr().err
