"""The processes of `diloco_hivemind`: the meeting, its sites, and hivemind's peers.

A peer reads a step's number from standard input, prepares its pseudo-gradient and prints a line. After the next input
line it makes the outer step, and prints the error of the average that it used and the digest of its parameters.
`diloco_hivemind` starts each peer with the arguments `ROLE FOLDER-OR-ADDRESS NUMBERS`. hivemind's peers run in an
interpreter without Shoal.
"""

import asyncio
import json
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

LR, MOMENTUM, SIDE, KIND = 0.7, 0.9, 512, "fp16"
RUN = "run-0123456789abcdef"


def shapes(count: int) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{number:03d}.w": (SIDE, SIDE) for number in range(count)}


def changes(step: int, peer: int, count: int) -> Any:
    """Return a peer's pseudo-gradient in a step, as one vector."""
    import torch

    return torch.randn(count * SIDE * SIDE, generator=torch.Generator().manual_seed(1000 * step + peer)) * 0.01


def truth(step: int, peers: int, count: int) -> Any:
    return sum(changes(step, peer, count).double() for peer in range(peers)) / peers


def tell(**figures: Any) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def digest(vector: Any) -> str:
    return sha256(vector.contiguous().numpy().tobytes()).hexdigest()


def terms_of(peers: int, count: int) -> Any:
    from shoal.diloco.agreed import Shapes
    from shoal.diloco.messages import Terms

    outer = {"kind": KIND, "lr": LR, "momentum": MOMENTUM}
    return Terms(Shapes(shapes(count)), 10**6, **outer, wait_s=60, sites=peers, quorum=peers)


def meeting(where: str, peers: int, count: int) -> None:
    import torch

    from shoal.diloco.agreed import Agreed
    from shoal.diloco.meeting import Meeting
    from shoal.diloco.messages import site_invite
    from shoal.diloco.serve import MeetingServer, serve
    from shoal.protocol.identity import Identity

    folder = Path(where)

    async def live() -> None:
        terms, identity = terms_of(peers, count), Identity.generate()
        first = {name: torch.zeros(shape) for name, shape in shapes(count).items()}
        server = MeetingServer(Meeting(folder, terms, {}, RUN, lambda: Agreed.of(first, terms.shapes)), identity)
        _, port = await serve(server, "127.0.0.1", 0, folder / "port")
        for peer in range(peers):
            invite = site_invite(identity, f"http://127.0.0.1:{port}", RUN, f"site-{peer}")
            invite.save(folder / f"{peer}.invite")
        tell(ready=True)
        await server.live(lambda: False)

    asyncio.run(live())


def site(where: str, peer: int, peers: int, count: int) -> None:
    import torch

    from shoal.diloco.agreed import Agreed
    from shoal.diloco.codec import Encoded, parts
    from shoal.diloco.messages import Figures, Greeting
    from shoal.diloco.remote import Remote
    from shoal.diloco.site import Site, meet
    from shoal.protocol.invite import read_invite

    torch.set_num_threads(1)
    folder = Path(where)
    terms = terms_of(peers, count)
    remote = Remote(read_invite(str(folder / f"{peer}.invite")), folder / f"site-{peer}", terms, patience_s=60)
    tensors = {name: torch.zeros(shape) for name, shape in shapes(count).items()}
    own = Site(remote.name, terms, Agreed.of(tensors, terms.shapes))
    remote.join(Greeting(about={}, placed=True))
    tell(ready=True)
    for line in sys.stdin:
        change = changes(int(line), peer, count)
        terms.shapes.scatter_(tensors, own.agreed.parameters - change)
        tell(ready=True)
        sys.stdin.readline()
        offer = own.offer(tensors)
        outcome, data = meet(remote, own.round, *offer, Figures(), give_up_s=60)
        own.apply(tensors, outcome, data)
        tell(done=True)
        encoded = Encoded.from_bytes(data, terms.kind, len(change))
        used = torch.cat([encoded.get(part) for part in parts(len(change))]).double()
        tell(
            error=float((used - truth(int(line), peers, count)).abs().max()),
            digest=digest(terms.shapes.gather(tensors)),
            forming_s=0.0,
        )


def hivemind_peer(first: str, peer: int, peers: int, count: int) -> None:
    import hivemind
    import torch
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression

    torch.set_num_threads(1)
    dht = hivemind.DHT([first] if first else None, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(shape) for shape in shapes(count).values()],
        dht,
        start=True,
        prefix="outer",
        target_group_size=peers,
        compression=Float16Compression(),
    )
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes(count).values()]
    outer = torch.optim.SGD(parameters, LR, MOMENTUM, nesterov=True)
    tell(ready=True, address=str(dht.get_visible_maddrs()[0]))
    for line in sys.stdin:
        pieces = changes(int(line), peer, count).view(count, SIDE, SIDE)
        with averager.get_tensors() as tensors:
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece)
        tell(ready=True)
        sys.stdin.readline()
        begun_s, forming_s = time.monotonic(), 0.0
        control = averager.step(wait=False, timeout=60)
        while not control.done():
            if not forming_s and control.stage == AveragingStage.RUNNING_ALLREDUCE:
                forming_s = time.monotonic() - begun_s
            time.sleep(0.002)
        group = control.result()
        with averager.get_tensors() as tensors:
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor.clone()
        outer.step()
        tell(done=True)
        used = torch.cat([parameter.grad.flatten() for parameter in parameters]).double()  # type: ignore[union-attr]
        tell(
            error=float((used - truth(int(line), peers, count)).abs().max()),
            digest=digest(torch.cat([parameter.detach().flatten() for parameter in parameters])),
            forming_s=forming_s,
            group=len(group or []),
        )


ROLES: dict[str, Any] = {"meeting": meeting, "site": site, "hivemind": hivemind_peer}

if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    ROLES[role](where, *map(int, numbers))
