"""Sites and their meeting, in one process or over loopback, with random numbers in place of training."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.codec import Encoded, Kind, parts
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Figures, Greeting, RoundOutcome, Terms, Welcome, site_invite
from shoal.diloco.remote import Remote
from shoal.diloco.serve import MeetingServer, serve
from shoal.diloco.site import Site, meet
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite

SHAPES = {"model.layers.0.w": (20, 5), "model.layers.1.w": (20, 5), "embed": (30, 4)}
LENGTH = 320  # numbers in a vector of these shapes
ABOUT = {"model": "abc", "sites.inner_steps": "50"}
RUN = "run-0123456789abcdef"


def initial() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}


def terms(**changed: object) -> Terms:
    return replace(Terms(Shapes(SHAPES), rounds=100, wait_s=10.0), **changed)  # type: ignore[arg-type]


def shared_terms(**changed: object) -> Terms:
    """Return terms with which the sites share the work of each round: six items."""
    return terms(items=lambda _: 6, **changed)


def encode(values: Tensor, kind: Kind) -> bytes:
    """Encode a vector as safetensors."""
    encoded = Encoded.empty(kind, len(values))
    for part in parts(len(values)):
        encoded.put(part, values[part])
    return encoded.to_bytes()


def decode(data: bytes, kind: Kind, length: int) -> Tensor:
    """Decode a vector: float64 for fp64, else float32. Raise CodecError for any other bytes."""
    encoded = Encoded.from_bytes(data, kind, length)
    return torch.cat([encoded.get(part) for part in parts(length)])


# In one process


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_meeting(folder: Path, terms: Terms, clock: Callable[[], float] | None = None) -> Meeting:
    return Meeting(folder, terms, ABOUT, "run", lambda: Agreed.of(initial(), terms.shapes), clock or Clock())


class Direct(Remote):
    """A `Remote` without a network: its meeting is in the same process."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting, self.name = meeting, name

    def join(self, greeting: Greeting) -> Welcome:
        return self.meeting.join(self.name, greeting)

    def take(self) -> int:
        return self.meeting.take(self.name)

    def leave(self) -> None:
        self.meeting.leave(self.name)

    def deal(self, round: int) -> list[str]:
        return self.meeting.deal(self.name, round)

    def offer(self, round: int, digest: str, data: bytes, figures: Figures) -> None:
        self.meeting.offer(self.name, round, digest, data, figures)
        if self.meeting.due():
            self.meeting.close()

    def outcome(self, round: int) -> tuple[RoundOutcome, bytes] | list[str]:
        if self.meeting.due():
            self.meeting.close()
        outcome = self.meeting.outcome(self.name, round)
        return self.meeting.waiting_for() if outcome is None else (outcome, self.meeting.average(round))

    def state(self, why: str) -> tuple[int, bytes]:
        self.meeting.heal(self.name, why)
        descriptor, path = self.meeting.state()
        return descriptor.round, path.read_bytes()


class Trainee:
    """A site in the same process as its meeting."""

    def __init__(self, name: str, meeting: Meeting) -> None:
        self.name, self.terms = name, meeting.terms
        self.tensors = initial()
        self.site = Site(name, self.terms, Agreed.of(self.tensors, self.terms.shapes))
        self.connect(meeting)

    def connect(self, meeting: Meeting) -> None:
        self.link = Direct(meeting, self.name)

    def join(self, about: dict[str, str] = ABOUT) -> None:
        self.link.join(Greeting(about=about, placed=True))
        self.heal("joins")

    def heal(self, why: str) -> None:
        self.site.adopt(self.tensors, *self.link.state(why))

    def train(self) -> None:
        draw = torch.Generator().manual_seed(hash((len(self.name), ord(self.name[-1]), self.site.round)) % 2**31)
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape, generator=draw) * 0.01

    def offer(self) -> None:
        self.train()
        self.sent = self.site.offer(self.tensors)
        self.link.offer(self.site.round, *self.sent, Figures())

    def finish(self) -> None:
        outcome = self.link.outcome(self.site.round)
        assert isinstance(outcome, tuple)
        self.site.apply(self.tensors, *outcome)


def joined(meeting: Meeting, names: str) -> list[Trainee]:
    """Let a site join for each letter of `names`."""
    trainees = [Trainee(name, meeting) for name in names]
    for each in trainees:
        each.join()
    return trainees


def rounds(trainees: list[Trainee], count: int) -> None:
    for _ in range(count):
        for each in trainees:
            each.offer()
        for each in trainees:
            each.finish()


def digests(trainees: list[Trainee]) -> set[str]:
    return {each.site.agreed.digest for each in trainees}


# Over loopback


class Served:
    """A meeting on a loopback port, in a thread. `kill` ends it without notice."""

    def __init__(self, folder: Path, agreed_terms: Terms) -> None:
        self.folder, self.terms = folder, agreed_terms
        self.identity = Identity.load_or_create(folder / "identity.pem")
        self.start()

    def start(self) -> None:
        self.stopping, ready = threading.Event(), threading.Event()

        async def live() -> None:
            self.meeting = Meeting(self.folder, self.terms, ABOUT, RUN, lambda: Agreed.of(initial(), self.terms.shapes))
            server = MeetingServer(self.meeting, self.identity)
            runner, self.port = await serve(server, "127.0.0.1", 0, self.folder / "port")
            ready.set()
            try:
                await server.live(self.stopping.is_set)
            finally:
                await runner.cleanup()

        self.thread = threading.Thread(target=asyncio.run, args=(live(),), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def kill(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def invite(self, name: str) -> Invite:
        return site_invite(self.identity, f"http://127.0.0.1:{self.port}", RUN, name)


@contextmanager
def served(folder: Path, agreed_terms: Terms) -> Iterator[Served]:
    host = Served(folder, agreed_terms)
    try:
        yield host
    finally:
        host.kill()


class RemoteTrainee:
    """A site that reaches its meeting over HTTP."""

    def __init__(self, host: Served, name: str, folder: Path) -> None:
        self.remote = Remote(host.invite(name), folder / name, host.terms, patience_s=20.0)
        self.tensors = initial()
        self.site = Site(name, host.terms, Agreed.of(self.tensors, host.terms.shapes))
        self.draw = torch.Generator().manual_seed(ord(name[-1]))
        self.history: list[str] = []
        self.remote.join(Greeting(about=ABOUT, placed=True))
        self.heal("joins")

    def heal(self, why: str) -> None:
        self.site.adopt(self.tensors, *self.remote.state(why))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            for tensor in self.tensors.values():
                tensor += torch.randn(tensor.shape, generator=self.draw) * 0.01
            digest, data = self.site.offer(self.tensors)
            outcome, average = meet(self.remote, self.site.round, digest, data, Figures(), give_up_s=20.0)
            self.site.apply(self.tensors, outcome, average)
            self.history.append(outcome.digest)


def at_once(*calls: Callable[[], Any]) -> None:
    """Run the calls in threads. Raise the first error."""
    failures: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
