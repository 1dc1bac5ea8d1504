"""The coordinator's HTTP interface: a table of routes. Each route authenticates the request, then calls the pool.

Invariant: `/healthz`, `/metrics`, `/v1/run`, `/v1/offer`, `/v1/status` and `/v1/history` are public. Every other route
needs a fresh signature. `/v1/register` accepts any key that sends an invite. `/v1/bookings` accepts only the coordinator's
own key, which its operator has. All other routes accept only registered keys of the roles in the table.
A banned key may only send heartbeats, which tell it so, and read the prompts that its worker may need until it knows.
Only nodes that grade can read answers, rewards and the settings of both. Others get prompts, which are other files.
`protocol.server` has the code that all routes share; `files` has the routes of rollout files.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from shoal.config import Config
from shoal.coordinator.assignment import nonce_secret
from shoal.coordinator.credit import BookedStakes, ChainStakes, Settlement
from shoal.coordinator.database import PoolError
from shoal.coordinator.folder import BUILT, OPEN_INVITE, SERVED, TASKS, open_state
from shoal.coordinator.http.files import FileRoutes, open_bucket
from shoal.coordinator.http.reports import CachedBody, read_metrics, read_offer, read_status
from shoal.coordinator.pool import Pool
from shoal.files import read_json
from shoal.ledger.connection import DatabaseFullError, DatabaseLostError
from shoal.ledger.table import Ledger
from shoal.protocol import messages
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, InviteError, open_payload
from shoal.protocol.messages import Ok, Role
from shoal.protocol.pace import Pace
from shoal.protocol.server import EVICTED, IDENTITY, Admission, Answer, Front, Handler, Request, Route, refusal
from shoal.shardcast.guard import issue
from shoal.store.folder import DamagedFileError, Folder, StoreError

READER_GRANT_S = 600.0  # validity of a new reader grant
MAX_REPORT_BYTES = 1 << 20  # limit for a learner's report, which lists submissions, and for a verdict without samples
MAX_HEARTBEAT_BYTES = 32 << 10  # a heartbeat's longest part lists MAX_SENDERS URLs
MAX_SAMPLE_BYTES = 40 << 10  # per group in a verdict: two texts of 4,000 characters
NUMBER = re.compile("[0-9]{1,15}")
SHA256 = re.compile("[0-9a-f]{64}")
STATUSES = {InviteError: 403, DamagedFileError: 410, StoreError: 507, DatabaseFullError: 507, DatabaseLostError: 503}

M = TypeVar("M", bound=BaseModel)


class Coordinator:
    def __init__(
        self,
        config: Config,
        run: str,
        identity: Identity,
        folder: Path,
        pace: Pace | None = None,
        front: Front | None = None,
    ) -> None:
        """Raise LedgerError for a ledger of another key, PoolFolderError, DatabaseLostError, PoolError, StoreError."""
        self.config = config
        self.run = run
        self.identity = identity
        folder.mkdir(parents=True, exist_ok=True)
        connection, self.nonces = open_state(folder, config.coordinator)
        stakes, secret = ChainStakes() if config.ledger.contract else None, nonce_secret(identity)
        self.pool = Pool(connection, Ledger(connection, identity), config, run, time.time, secret=secret, stakes=stakes)
        self.settlement = Settlement(config, self.pool.db, stakes, self.pool.notices.append) if stakes else None
        self.front = front or Front()
        self.admission = Admission(
            run, self.nonces, self.pool.members.role, time.time, pace or Pace(), statuses=STATUSES
        )
        self.store = Folder(folder / "store")
        self.store.clean()
        self.files = FileRoutes(config, self.pool, self.store, open_bucket(config), self.admission)
        self.folder, built = folder, folder / BUILT
        self.served = config.tasks.public(read_json(built)["public"] if built.exists() else "")
        self._grants: dict[str, tuple[float, str]] = {}  # by key: expiry and grant

    def status(self) -> Status:
        return read_status(self.pool.db, self.config, self.run, self.pool.notices)

    def published_invite(self) -> str:
        """Return the open invite that the operator published; "" if there is none or it has expired. Raise InviteError."""
        path = self.folder / OPEN_INVITE
        try:
            text = path.read_text()
        except FileNotFoundError:
            return ""
        invite = Invite.decode(text)
        payload = open_payload(invite.signed.model_dump_json(), self.identity.public, self.run)
        if not payload.open:
            raise InviteError(
                f"{path} is not an open invite; remove it, or make one with `shoal pool invite --open --publish`"
            )
        return invite.encode() if time.time() < payload.expires_s else ""

    def app(self) -> web.Application:
        m, pool, every = messages, self.pool, get_args(Role)  # every role
        anyone, signed = self.front.open_to_all, self.admission.signed
        learning = pool.learning
        verdict_bytes = MAX_REPORT_BYTES + self.config.workers.largest * MAX_SAMPLE_BYTES
        queries: list[tuple[str, Callable[[Mapping[str, str]], Answer], Sequence[Role]]] = [
            ("/v1/config", lambda _: self._described(self.config), m.GRADING),
            ("/v1/ledger/{after}", lambda path: self._ledger(path["after"]), ["validator"]),
            ("/v1/batches/{step}", lambda path: pool.batches.of_step(_number(path["step"], "a step")), ["learner"]),
        ]
        app = web.Application()
        app[IDENTITY] = self.identity
        app.add_routes(
            [
                web.get("/healthz", anyone(self._healthz)),
                web.get("/v1/run", anyone(self._run)),
                web.get("/v1/offer", anyone(_cached(self._offer))),
                web.get("/v1/status", anyone(_cached(lambda: self.status().model_dump_json()))),
                web.get("/v1/history", anyone(self._history)),
                web.get("/metrics", anyone(_cached(lambda: read_metrics(pool.db), CONTENT_TYPE_PLAIN_0_0_4))),
                web.post("/v1/register", signed(self._register, None, rare=True)),
                web.post("/v1/bookings", signed(self._book, None)),
                web.post("/v1/heartbeat", signed(self._heartbeat, [*every, EVICTED], MAX_HEARTBEAT_BYTES)),
                web.post("/v1/drain", signed(self._drain, ["worker"], rare=True)),
                web.get("/v1/tasks/{sha256}", signed(self._task_data, [*every, EVICTED])),
                *self.files.routes(),
                *(web.get(path, signed(_query(answer), roles)) for path, answer, roles in queries),
                web.post("/v1/claims", signed(self._claim, ["validator"])),
                web.post("/v1/verdicts", signed(self._judge, ["validator"], verdict_bytes)),
                web.post("/v1/heads", signed(self._head, ["validator"])),
                web.post("/v1/policies", signed(_report(m.PolicyVersion, learning.published), ["origin"])),
                web.post("/v1/steps", signed(_report(m.StepReport, learning.reported), ["learner"], MAX_REPORT_BYTES)),
                web.post("/v1/evaluations", signed(_report(m.Evaluation, learning.evaluated), ["evaluator"])),
            ]
        )
        return self.front.attach(app)

    # --- public ------------------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"run": self.run, "protocol": messages.VERSION})

    async def _run(self, request: web.Request) -> web.Response:
        return self._described(self.config.model_copy(update={"tasks": self.served}))

    def _described(self, config: Config) -> web.Response:
        fields = config.model_dump(exclude={"coordinator": {"database"}, "ledger": {"rpc", "key_file"}})
        keys = self.pool.members.keys()
        descriptor = messages.RunDescriptor(protocol=messages.VERSION, run=self.run, config=fields, keys=keys)
        signed = Signed.make(self.identity, descriptor.model_dump_json(), domain="run")
        return web.json_response(text=signed.model_dump_json())

    def _offer(self) -> str:
        key, invite, workers = self.identity.public, self.published_invite(), self.pool.members.count_workers()
        return read_offer(self.pool.db, self.config, self.run, key, invite, workers).model_dump_json()

    async def _history(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not NUMBER.fullmatch(after):
            return refusal(400, f"after={after[:40]!r} is not a cursor; start with 0")
        return web.Response(body=self.pool.db.history.page(int(after)), content_type="application/json")

    # --- members -----------------------------------------------------------------------------------------------------

    async def _register(self, request: Request) -> Answer:
        """Register a node. The chain is read after all other checks. The nonce is spent last, so that only an admissible
        key can make the coordinator write."""
        registration = messages.Registration.model_validate_json(request.body)
        if registration.protocol != messages.VERSION:
            raise PoolError(
                f"this pool speaks protocol {messages.VERSION}, but this node speaks {registration.protocol}: "
                "install the same version of Shoal as the pool's operator",
                400,
            )
        payload = open_payload(registration.invite, self.identity.public, self.run)
        if self.pool.members.check_invite(request.key, payload, registration.capability) and self.settlement:
            await self.settlement.read_offered(request.key, registration.payer, request.address)
        self.pool.members.may_register(request.key, payload, registration.capability)
        request.head.spend(self.nonces)
        return self.pool.members.register(
            request.key, payload, registration.url, registration.capability, registration.payer
        )

    async def _book(self, request: Request) -> Answer:
        """Book a stake. Only the operator may do this, with this coordinator's key."""
        stakes = self.pool.members.stakes
        if request.key != self.identity.public:
            raise PoolError("only the operator may book stakes", 403)
        request.head.spend(self.nonces)
        if not isinstance(stakes, BookedStakes):
            raise PoolError("this pool's stakes are in a contract: see `shoal pool stake --help`")
        stakes.book(messages.Booking.model_validate_json(request.body))
        return Ok()

    async def _heartbeat(self, request: Request) -> Answer:
        answer = self.pool.members.heartbeat(request.key, messages.Heartbeat.model_validate_json(request.body))
        if answer.state == "evicted":
            return answer
        return answer.model_copy(update={"reader_grant": self._reader_grant(request.key)})

    def _reader_grant(self, key: str) -> str:
        """Return a reader grant, cached for half of its validity, because signing is much of a heartbeat's cost."""
        now_s, (until_s, grant) = time.time(), self._grants.get(key, (0.0, ""))
        if not READER_GRANT_S / 2 < until_s - now_s <= READER_GRANT_S:  # half of it is over, or the clock was set back
            until_s = now_s + READER_GRANT_S
            grant = issue(self.identity.private_key, key, self.run, until_s)
            self._grants[key] = until_s, grant
        return grant

    async def _drain(self, request: Request) -> Answer:
        self.pool.members.drain(request.key)
        return Ok()

    async def _task_data(self, request: Request) -> Answer:
        """Return a manifest, a chunk, or a file of the user's code. The client checks the hash."""
        name, grades = request.match["sha256"], self.pool.members.role(request.key) in messages.GRADING
        path = self.folder / (TASKS if grades else SERVED) / name
        if not SHA256.fullmatch(name) or not path.is_file():
            raise PoolError(f"no task data {name[:64]!r} here", 404)
        self.admission.pace.moved(request.key, path.stat().st_size)
        return web.FileResponse(path)

    def _ledger(self, after: str) -> Answer:
        return web.Response(body=self.pool.ledger_page(_number(after, "the number of an entry")))

    async def _claim(self, request: Request) -> Answer:
        claim = messages.ClaimRequest.model_validate_json(request.body)
        return self.pool.judgement.claim(request.key, claim.most)

    async def _judge(self, request: Request) -> Answer:
        self.pool.judgement.judge(request.key, messages.Verdict.model_validate_json(request.body))
        return Ok()

    async def _head(self, request: Request) -> Answer:
        self.pool.record_head(request.key, Signed.model_validate_json(request.body))
        return Ok()


def _number(text: str, what: str) -> int:
    """Parse a number in a path. Raise PoolError."""
    if not NUMBER.fullmatch(text):
        raise PoolError(f"{text[:40]!r} is not {what}", 400)
    return int(text)


def _cached(make: Callable[[], str], content_type: str = "application/json; charset=utf-8") -> Route:
    """Return a handler that answers with a report. `CachedBody` limits the time spent on making reports."""
    body = CachedBody(make)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body.get(), headers={"Content-Type": content_type})

    return handler


def _query(answer: Callable[[Mapping[str, str]], Answer]) -> Handler:
    """Return a handler that answers from the path's parameters."""

    async def handler(request: Request) -> Answer:
        return answer(request.match)

    return handler


def _report(model: type[M], record: Callable[[M], None]) -> Handler:
    """Return a handler that records a report of this model."""

    async def handler(request: Request) -> Answer:
        record(model.model_validate_json(request.body))
        return Ok()

    return handler
