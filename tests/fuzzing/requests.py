"""Makes requests to the coordinator: bytes that are not HTTP, garbage on every route, correctly signed garbage from
each role, and honest requests that advance the run.

This module uses only the coordinator's routes and messages, not its internals.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args
from urllib.parse import quote

from blake3 import blake3

from shoal.ledger.chain import sign_opinion
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.messages import VERSION, Opinion, Reason, Role
from shoal.protocol.signing import sign_request

from .damage import VALUES, damaged

RUN = "fuzz"
DEADLINE_S = 10.0
ROUTES = [
    ("GET", "/healthz", ""),
    ("GET", "/v1/run", ""),
    ("GET", "/v1/status", ""),
    ("POST", "/v1/register", "worker"),
    ("POST", "/v1/heartbeat", "worker"),
    ("PUT", "/v1/submissions/{id}", "worker"),
    ("POST", "/v1/claims", "validator"),
    ("GET", "/v1/submissions/{id}", "validator"),
    ("PUT", "/v1/accepted/{id}", "validator"),
    ("POST", "/v1/verdicts", "validator"),
    ("POST", "/v1/policies", "origin"),
    ("GET", "/v1/batches/{step}", "learner"),
    ("GET", "/v1/accepted/{id}", "learner"),
    ("POST", "/v1/steps", "learner"),
    ("POST", "/v1/evaluations", "evaluator"),
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"]


@dataclass
class Site:
    """Makes requests with the keys of registered nodes and with what these nodes know about the run."""

    random: Random
    port: int
    coordinator: Identity
    members: dict[str, Identity] = field(default_factory=dict)
    ids: list[str] = field(default_factory=lambda: ["0" * 16 + "-000000"])
    files: dict[str, str] = field(default_factory=dict)  # hash of the file of each uploaded submission
    sent: list[bytes] = field(default_factory=list)  # honest requests, to damage and replay

    async def join(self) -> None:
        """Register one node of each role and publish the first version."""
        for role in get_args(Role):
            self.members[role] = Identity.generate()
            body = {"protocol": VERSION, "invite": self.invite(role), "url": None}
            await self.honest(role, "POST", "/v1/register", body)
        await self.honest("origin", "POST", "/v1/policies", {"version": 0, "digest": "d" * 64, "size_bytes": 1})

    def invite(self, role: str, **changed: Any) -> str:
        payload = {"run": RUN, "role": role, "name": f"n{secrets.token_hex(8)}", "nonce": secrets.token_hex(16)}
        text = json.dumps(payload | {"expires_s": int(time.time()) + 600} | changed)
        return Signed.make(self.coordinator, text, domain="invite").model_dump_json()

    async def honest(self, role: str, method: str, path: str, body: Any) -> Any:
        """Send an honest request. Return the answer, or None if the coordinator refuses."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = self.signed(self.members[role], method, path, content)
        self.sent = [*self.sent[-50:], request]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        head, _, text = answer.partition(b"\r\n\r\n")
        return json.loads(text) if b" 200 " in head.splitlines()[0] else None

    async def advance(self) -> None:
        """Request a task. Then upload, claim and judge a submission, but stop at a random stage."""
        answer = await self.honest("worker", "POST", "/v1/heartbeat", {"policy_version": 0, "wants_task": True})
        if answer and answer["assignment"]:
            self.ids = [*self.ids[-8:], answer["assignment"]["id"]]
        stage, id = self.random.randrange(4), self.ids[-1]
        if stage > 0:
            await self.honest("worker", "PUT", f"/v1/submissions/{id}", data := secrets.token_bytes(8))
            self.files[id] = blake3(data).hexdigest()
        if stage > 1:
            await self.honest("validator", "POST", "/v1/claims", {"most": 1})
        if stage > 2:
            stored = await self.honest("validator", "PUT", f"/v1/accepted/{id}", b"accepted")
            await self.honest("validator", "POST", "/v1/verdicts", self.verdict(id, None, stored and stored["hash"]))

    async def case(self) -> tuple[bytes, bool, bool]:
        """Return a request, whether it is complete HTTP, and whether a node of the route's role signed it."""
        random = self.random
        if random.random() < 0.05:
            await self.advance()
        method, path, role = random.choice(ROUTES)
        target, body = self.target(path), self.content(path)
        match random.randrange(10):
            case 0:
                return damaged(random, random.choice(self.sent), self.sent), False, False
            case 1:
                request = random.choice(self.sent)
                return request, True, False  # a replay
            case 2:
                return _http(random.choice(METHODS), target, self.headers({}), body), False, False
            case 3:
                signer = random.choice([*self.members.values(), Identity.generate()])
                return self.signed(signer, random.choice(METHODS), target, body, self.headers), False, False
            case _:
                signer = self.members[role] if role else Identity.generate()
                if path == "/v1/register":
                    signer = Identity.generate()
                return self.signed(signer, method, target, body), True, bool(role)

    def target(self, path: str) -> str:
        random = self.random
        junk = quote(str(random.choice(VALUES)), safe="", errors="replace")[:3_000] or "0"
        special = ["..%2f..%2fidentity.pem", "%00", "%ff", "9" * 30, "9" * 5_000, "%D9%A1", "1_0", "+1", "-0"]
        junk = random.choice([junk, *special])
        known = {"{id}": random.choice(self.ids), "{digest}": "c" * 64, "{step}": "0"}
        for name, value in known.items():
            path = path.replace(name, value if random.random() < 0.6 else junk)
        return path + random.choice(["", "", "", "", "?", "?a=b", "?" + "x" * 500, "/", "//"])

    def verdict(self, id: str, reason: Reason | None, accepted: str | None) -> dict[str, Any]:
        file = self.files.get(id, "0" * 64)
        opinion = Opinion(run=RUN, submission=id, file=file, reason=reason, accepted=accepted or "", tokens=6)
        signed = sign_opinion(opinion, self.members["validator"]).model_dump_json()
        groups = [{"reward_mean": 0.5, "useful": True, "tokens": 3}] * 2
        return {"submission": id, "opinion": signed, "detail": "", "evidence": {"margin": 0.5}, "groups": groups}

    def body(self, path: str) -> dict[str, Any]:
        """Return an honest body for this path."""
        id = self.random.choice(self.ids)
        bodies: dict[str, Callable[[], dict[str, Any]]] = {
            "/v1/register": lambda: {
                "protocol": VERSION,
                "invite": self.invite(self.random.choice(get_args(Role))),
                "url": "http://x:1",
            },
            "/v1/heartbeat": lambda: {"policy_version": 0, "wants_task": True, "stats": {"doing": "x", "tokens": 5}},
            "/v1/claims": lambda: {"most": 2},
            "/v1/verdicts": lambda: self.verdict(id, self.random.choice([None, Reason.BOUNDS, Reason.UNREADABLE]), ""),
            "/v1/policies": lambda: {"version": self.random.randrange(3), "digest": "d" * 64, "size_bytes": 1},
            "/v1/steps": lambda: {"step": self.random.randrange(3), "metrics": {"loss": 0.5}, "trained": [id]},
            "/v1/evaluations": lambda: {"version": 0, "greedy": 0.5, "sampled": None, "n": 9, "final": False},
        }
        return bodies.get(path, dict)()

    def content(self, path: str) -> bytes:
        random = self.random
        match random.randrange(8):
            case 0:
                return random.randbytes(random.choice([0, 1, 100, 5_000]))
            case 1:
                return random.choice([b"null", b"[" * 20_000, b"{" * 9, b'"\\ud800"', b"NaN", b"1e999", b"[]", b"\xff"])
            case 2:
                return damaged(random, json.dumps(self.body(path)).encode())
            case 3:
                return json.dumps(self.body(path)).encode()
            case _:
                body = self.body(path)
                for _ in range(random.choice([1, 1, 2])):
                    _mutate(random, body)
                return json.dumps(body).encode()

    def signed(
        self,
        identity: Identity,
        method: str,
        target: str,
        body: bytes,
        mutate: Callable[[dict[str, str]], dict[str, str]] = lambda headers: headers,
    ) -> bytes:
        path, _, query = target.partition("?")
        headers = sign_request(
            identity,
            method=method,
            path=path,
            query=query,
            body=body,
            audience=RUN,
            created_s=int(time.time()),
            nonce=secrets.token_hex(16),
        )
        return _http(method, target, mutate(headers), body)

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Change some of the headers and add some."""
        random = self.random
        more = {
            "content-type": "text/html; charset=\xff",
            "content-encoding": random.choice(["gzip", "deflate", "br", "x"]),
            "transfer-encoding": random.choice(["chunked", "gzip, chunked", "x"]),
            "content-length": random.choice(["-1", "1", "99999999999999999999", "x", "0x10"]),
            "expect": "100-continue",
            "upgrade": "websocket",
            "range": "bytes=0-",
            "cookie": "a=" + "x" * random.choice([10, 9_000]),
            "x\x00": "y",
            "signature": "shoal=:" + "A" * 86 + "==:",
            "shoal-audience": "x" * 300,
        }
        for name in random.sample(list(more), random.choice([0, 1, 2])):
            headers[name] = more[name]
        for name in random.sample(list(headers), min(len(headers), random.choice([0, 1]))):
            headers[name] = damaged(random, headers[name].encode("latin-1")).decode("latin-1")
        return headers


def _mutate(random: Random, tree: Any) -> None:
    """Replace, add or remove one value somewhere in this JSON, in place."""
    while isinstance(tree, (dict, list)) and tree:
        key = random.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if isinstance(tree[key], (dict, list)) and tree[key] and random.random() < 0.6:
            tree = tree[key]
            continue
        match random.randrange(6):
            case 0:
                del tree[key]
            case 1 if isinstance(tree, dict):
                tree[random.choice(["more", "", "step"])] = deepcopy(random.choice(VALUES))
            case 2 if isinstance(tree, list):
                tree.extend([tree[key]] * random.choice([1, 300]))
            case _:
                tree[key] = deepcopy(random.choice(VALUES))
        return


def _http(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
    named = {"host": "c", "connection": "close", "content-length": str(len(body))} | headers
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
