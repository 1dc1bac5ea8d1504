"""Pretraining: next-token training on a stream of text, alone or as one of several sites.

    loss   mean over the predicted tokens of a step's sequences     rate   linear warm-up, then a cosine to `final_lr`
    inner optimizer AdamW, gradients clipped by their norm: DiLoCo (arXiv 2311.08105), section 3 and table 5

Invariant: a step's result is a function of the weights, moments and place in the data, all of which a checkpoint holds. So
a resumed training equals the uninterrupted one, bit for bit on the CPU.
On the leader of a site's ranks (`net`). A checkpoint is one safetensors file with the parameters, AdamW's moments, and what
the sites agreed on; it appears whole or not at all, one whose bits changed since is refused, and nothing is unpickled.
Left out: masks between documents; writing checkpoints while training goes on.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.sites import PretrainSection, SitesSection
from shoal.diloco.agreed import Agreed, Shapes, digest
from shoal.diloco.messages import MeetingLink, RoundClosedError, RoundOutcome, Terms, about_model
from shoal.diloco.site import Participant
from shoal.files import remove_leftovers, write_file
from shoal.learner.checkpoint import CheckpointError
from shoal.learner.policy import write_folder
from shoal.learner.pretrain.net import Net
from shoal.learner.pretrain.text import Corpus, TextPlace, TokenStream
from shoal.learner.training import CHECKPOINTS, METRICS, Training, claim, drop_after
from shoal.model.load import stored_shapes

OWN = {  # what may differ from site to site, or between a stop and a resumption
    "pretrain": {"data", "micro_batch", "checkpoint_every"},
    "sites": {"wait_s", "give_up_s", "quorum", "sites", "host", "port", "url"},
}
KEPT = 2  # checkpoints

log = logging.getLogger(__name__)


class Pretraining(Training):
    def __init__(
        self,
        net: Net,
        tokenizer: Any,
        stream: TokenStream,
        heldout_ST: Tensor,
        config: Config,
        folder: Path,
        about: dict[str, str],
        outer: "OuterSteps | None" = None,
    ) -> None:
        """`about`: what the training follows from, by name."""
        self.net, self.tokenizer, self.stream, self.heldout_ST = net, tokenizer, stream, heldout_ST
        self.settings: PretrainSection = config.pretrain
        self.about, self.outer = about, outer
        self.kept = 0  # the step of the newest checkpoint
        self.started_s, self.computed_s = time.monotonic(), 0.0
        super().__init__(folder, self.settings.steps)

    def begin(self) -> None:
        """Take up the newest checkpoint, and the place in the sites' meeting."""
        claim(self.folder, self.about)
        checkpoint = read(self.folder / CHECKPOINTS)
        saved = checkpoint or Saved()
        if checkpoint is not None:
            self.net.restore(saved.tensors, updates=saved.updates)
            self.net.pull()
            log.info("going on after step %d of %d", saved.step, self.steps)
        if self.outer is not None:
            saved = self.outer.begin(self.about, saved)
        self.net.push()
        self.step = self.kept = saved.step
        drop_after(self.folder / METRICS, self.step)
        self.stream.move(TextPlace(**saved.place) if saved.place else None)
        self.evaluate()

    def train(self) -> None:
        """One inner step; then, where a round is due, give to the other sites and take from them."""
        started_s = time.monotonic()
        ids_BT = self.stream.sequences(self.settings.batch, self.settings.tokens)
        lr = rate(self.step, self.settings)
        loss, norm = self.net.step(ids_BT, lr=lr, number=self.step + 1)
        self.step += 1
        seconds = time.monotonic() - started_s
        self.computed_s += seconds
        speed = round(ids_BT.numel() / seconds)
        self.record(loss=loss, lr=lr, grad_norm=norm, tokens=ids_BT.numel(), tokens_per_s=speed)
        self.log(f"loss {loss:.3f}", often=True)
        if self.outer is not None:
            self.outer.spent.loss, self.outer.spent.computed_s = loss, self.computed_s
            if self.step == self.outer.due:
                self.meet(self.outer)

    def meet(self, outer: "OuterSteps") -> None:
        """Give to the other sites, and go on with what all agreed; or take over what they agreed if it came too late."""
        self.net.pull()
        outcome, before = None, outer.site.round
        try:
            outcome = outer.give(self._place())
            if outer.site.name in outcome.left_out:
                self.net.reset()  # what broke the parameters is in the moments too
        except RoundClosedError as error:
            self.step = outer.take_over(str(error))
        self.net.push()
        if outer.site.round != before:  # applied, or healed after a round it was late for
            self.record(
                round=outer.site.round,
                quorum=outcome.kept if outcome else None,
                left_out=outcome.left_out if outcome else None,
                missing=outcome.missing if outcome else None,
                digest=outer.site.agreed.digest,
                sent_bytes=outer.spent.sent_bytes,  # since the start, like the rest
                received_bytes=outer.spent.received_bytes,
                computed_s=round(self.computed_s, 3),
                waited_s=round(outer.spent.synced_s, 3),
                elapsed_s=round(time.monotonic() - self.started_s, 3),
            )

    def keep(self, *, last: bool) -> None:
        if last or self.step % self.settings.checkpoint_every == 0:
            self.evaluate()
        if last or self.step - self.kept >= self.settings.checkpoint_every or self.step < self.kept:
            self.checkpoint()

    def checkpoint(self) -> None:
        self.kept = self.step
        round = self.outer.site.round if self.outer else 0
        tensors = self.net.state() | (self.outer.state() if self.outer else {})
        write(self.folder / CHECKPOINTS, Saved(self.step, self.net.updates, self._place(), round, tensors))

    def evaluate(self) -> None:
        """Record the mean loss over the held-out sequences, in nats per token, and its perplexity."""
        if len(self.heldout_ST):
            loss = self.net.evaluate(self.heldout_ST)
            self.record(heldout_loss=loss, perplexity=round(math.exp(min(loss, 100)), 4))
            self.log(f"held-out loss {loss:.4f}")

    def pause(self) -> None:
        if self.step != self.kept:
            self.checkpoint()

    def end(self) -> None:
        if self.outer is not None:
            self.outer.link.leave()

    def write_model(self, final: Path) -> None:
        self.net.pull()
        tensors, shapes = self.net.model.state_dict() | self.net.tensors, stored_shapes(self.net.model)
        named = ((name, tensors[name]) for name in shapes)
        write_folder(self.net.model, self.tokenizer, final, named, shapes, replace=True)

    def _place(self) -> dict[str, int] | None:
        return self.stream.place.to_json() if self.stream.place else None


def rate(step: int, settings: PretrainSection) -> float:
    """The learning rate of step `step`, from 0: linear warm-up, then half a cosine from `lr` to `final_lr`."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.final_lr + (settings.lr - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def about(config: Config, folder: Path, corpus: Corpus | None, *, sites: bool) -> dict[str, str]:
    """`folder` is the model's. Without a corpus, whoever has one says which data it is."""
    result = about_model(folder) | {"run.seed": str(config.run.seed)}
    if corpus is not None:
        result["data"] = corpus.fingerprint()
    for name in ("pretrain", "sites") if sites else ("pretrain",):
        section = getattr(config, name)
        result |= {f"{name}.{key}": str(value) for key, value in section if key not in OWN[name]}
    return result


# --- several sites ------------------------------------------------------------------------------------------------------


class OuterSteps(Participant):
    """This site in the sites' meeting.

    No sequence is trained twice for an offer that was accepted: the place in the data after each offer is on disk before
    the offer leaves.
    """

    def __init__(
        self,
        name: str,
        settings: SitesSection,
        terms: Terms,
        link: MeetingLink,
        tensors: Mapping[str, Tensor],
        folder: Path,
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(name, terms, link, tensors, give_up_s=settings.give_up_s)
        self.inner_steps, self.tensors, self.stopped = settings.inner_steps, tensors, stopped
        self.places = folder / "places.json"  # after the last offers, by round

    @property
    def due(self) -> int:
        """The number of inner steps after which the open round's offer leaves."""
        return (self.site.round + 1) * self.inner_steps

    def begin(self, about: dict[str, str], saved: "Saved") -> "Saved":
        """Join the meeting. Return where to go on from a checkpoint, or from nothing. Raise MeetingError."""
        if "rounding" in saved.tensors:
            self.site.agreed = Agreed.take(saved.tensors, self.site.terms.shapes)
            self.site.round, self.site.feedback.left = saved.round, saved.tensors["rounding"]
        places = self._held_places()
        placed = saved.place is not None or bool(places)
        welcome = self.join(about, placed=placed)
        if str(welcome.accepted) in places and welcome.accepted >= self.site.round:
            saved.place = places[str(welcome.accepted)]
        if not welcome.same:
            if welcome.accepted >= self.site.round:
                self.site.forget()  # the checkpoint is older than this offer
            saved.step = self.take_over("it comes back" if placed else "it joins")
        return saved

    def give(self, place: dict[str, int] | None) -> RoundOutcome:
        """Exchange, with `place` as the next token's. Raise RoundClosedError: `take_over`."""
        held = {round: where for round, where in self._held_places().items() if int(round) >= self.site.round - 1}
        write_file(self.places, json.dumps(held | {str(self.site.round): place}).encode())
        return self.exchange(self.tensors, self.stopped)

    def take_over(self, why: str) -> int:
        """Heal. Return the inner step that belongs to what is agreed."""
        log.warning("taking over the state of the meeting: %s", why)
        return self.heal(self.tensors, why) * self.inner_steps

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this site."""
        return self.site.agreed.tensors() | {"rounding": self.site.feedback.left}

    def _held_places(self) -> dict[str, Any]:
        return json.loads(self.places.read_text()) if self.places.exists() else {}


def terms_of(config: Config, tensors: Mapping[str, Tensor]) -> Terms:
    """How the sites of this run meet. Raise ConfigError if the steps are no whole number of rounds."""
    settings, steps = config.sites, config.pretrain.steps
    if steps % settings.inner_steps:
        raise ConfigError(
            f"pretrain.steps = {steps} is not a multiple of sites.inner_steps = {settings.inner_steps}: "
            "the last steps would reach no other site"
        )
    return Terms(Shapes.of(tensors), rounds=steps // settings.inner_steps, **settings.terms)


# --- checkpoints ---------------------------------------------------------------------------------------------------------


@dataclass
class Saved:
    """A checkpoint's content."""

    step: int = 0  # inner steps done
    updates: int = 0  # of AdamW since its moments were zero
    place: dict[str, int] | None = None  # of the next token
    round: int = 0  # of the sites' meeting, the next one
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)


def write(folder: Path, saved: Saved) -> Path:
    """Write a checkpoint, then remove older ones. Raise OSError if the disk refuses."""
    held = json.dumps(asdict(replace(saved, tensors={})) | {"tensors": None})  # `asdict` would copy them
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in saved.tensors.items()}
    path = folder / f"step-{saved.step:08d}.safetensors"
    write_file(path, save(tensors, metadata={"progress": held, "sha256": _checksum(held, tensors)}))
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()
    return path


def read(folder: Path) -> Saved | None:
    """The newest checkpoint, None without one. Raise CheckpointError."""
    remove_leftovers(folder)
    result = sorted(folder.glob("step-*.safetensors"))
    if not result:
        return None
    try:
        with safe_open(result[-1], framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if metadata["sha256"] != _checksum(metadata["progress"], tensors):
            raise ValueError("its content is not what was written")
        held = json.loads(metadata["progress"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{result[-1]} is damaged ({error}): remove it to go on from an older one") from error
    return Saved(**held | {"tensors": tensors})


def _checksum(held: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the progress and of every tensor, each with its name, type and shape."""
    result = sha256(held.encode())
    for name, tensor in sorted(tensors.items()):
        result.update(f"\n{name} {tensor.dtype} {list(tensor.shape)} {digest(tensor.flatten())}".encode())
    return result.hexdigest()
