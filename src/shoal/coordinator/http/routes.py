"""The coordinator's HTTP interface: a table of routes. Each route checks who asks, then calls the pool.

Invariant: only `/healthz`, `/metrics`, `/v1/run`, `/v1/status` and `/v1/history` answer without a fresh signature by a
registered key of a role in the table. `/v1/register` needs a signature by any key, and an invite; `/v1/bookings` one by the
coordinator's own key, which its operator has.
What all routes share is in `admission` and `front`.
Called by every node; started by `shoal coordinator`. It also serves the store's folder.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ValidationError

from shoal.config import Config
from shoal.coordinator.credit.settlement import Settlement
from shoal.coordinator.credit.stakes import BookedStakes, ChainStakes
from shoal.coordinator.http.admission import Admission, body_pieces, read_body
from shoal.coordinator.http.costly import Costly
from shoal.coordinator.http.front import Front, refusal
from shoal.coordinator.http.pace import Pace
from shoal.coordinator.http.transfers import Kind, Transfers, open_transfers
from shoal.coordinator.pool import Pool
from shoal.coordinator.state.database import PoolError
from shoal.coordinator.state.opening import open_state
from shoal.coordinator.tables.connection import DatabaseFullError, DatabaseLostError
from shoal.coordinator.work.nonces import nonce_secret
from shoal.protocol import messages
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import InviteError, open_payload
from shoal.protocol.messages import Role
from shoal.protocol.signing import SignatureError
from shoal.shardcast.serve.passes import issue
from shoal.store.folder import Folder, StoreError

if TYPE_CHECKING:
    from shoal.coordinator.state.lead import Lead

M = TypeVar("M", bound=BaseModel)
Answer = BaseModel | bytes | web.StreamResponse
Handler = Callable[["Request"], Awaitable[Answer]]
READER_GRANT_S = 600.0  # of a new one
MAX_REPORT_BYTES = 1 << 20  # of the learner, whose report lists a batch's submissions; and of a verdict's evidence
MAX_HEARTBEAT_BYTES = 32 << 10  # its longest part names MAX_SENDERS servers by their URLs
MAX_SMALL_BYTES = 4 << 10  # a registration, a claim, a version, an evaluation: a few fields
MAX_SAMPLE_BYTES = 40 << 10  # of one group in a verdict: two texts of 4,000 characters
STEP = CURSOR = re.compile("[0-9]{1,15}")
SHA256 = re.compile("[0-9a-f]{64}")
TASKS = "tasks"  # the task set in the coordinator's folder: files by their hash


@dataclass(frozen=True)
class Request:
    """A verified request: who signed it, with what body, for which path parameters."""

    key: str
    body: bytes
    match: dict[str, str]


class Coordinator:
    def __init__(
        self,
        config: Config,
        run: str,
        identity: Identity,
        folder: Path,
        pace: Pace | None = None,
        lead: "Lead | None" = None,
    ) -> None:
        """`lead`: of its PostgreSQL (`coordinator.database`); None: its state is in `folder`."""
        self.config = config
        self.run = run
        self.identity = identity
        folder.mkdir(parents=True, exist_ok=True)
        self.lead = lead
        state = open_state(folder, identity, lead)
        stakes, secret = ChainStakes() if config.ledger.backend == "evm" else None, nonce_secret(identity)
        self.pool = Pool(state.connection, state.ledger, config, run, time.time, secret=secret, stakes=stakes)
        self.settlement = Settlement(config, self.pool.db, stakes, self.pool.notices.append) if stakes else None
        self.pace = pace or Pace()
        self.front = Front(identity, self.pace)
        self.admission = Admission(run, state.nonces, self.pool.members.role, time.time, self.pace)
        self.transfers = open_transfers(config)  # None: this process takes and gives the files itself
        self.store = Folder(folder / "store")
        self.store.clean()
        self.tasks = folder / TASKS
        self.status = Costly(lambda: self.pool.status().model_dump_json())
        self.metrics = Costly(self.pool.metrics)
        self._grants: dict[str, tuple[float, str]] = {}  # by key: until when, and the grant
        self._uploads: dict[tuple[str, str], object] = {}  # kind and submission id -> the upload in progress
        self._storing = asyncio.Lock()  # one upload at a time gets its name and its place in the database

    def app(self) -> web.Application:
        m, pool, anyone = messages, self.pool, self.front.open_to_all
        verdict_bytes = MAX_REPORT_BYTES + self.config.workers.largest * MAX_SAMPLE_BYTES
        app = web.Application()
        self.front.attach(app)
        app.add_routes(
            [
                web.get("/healthz", anyone(self._healthz)),
                web.get("/v1/run", anyone(self._run)),
                web.get("/v1/status", anyone(self._status)),
                web.get("/v1/history", anyone(self._history)),
                web.get("/metrics", anyone(self._metrics)),
                web.post("/v1/register", self._answering(self._register)),
                web.post("/v1/heartbeat", self._signed(self._heartbeat, get_args(Role), MAX_HEARTBEAT_BYTES)),
                web.post("/v1/drain", self._signed(self._drain, ["worker"])),
                web.get("/v1/tasks/{sha256}", self._signed(self._task_data, get_args(Role))),
                web.post("/v1/claims", self._signed(self._claim, ["validator"])),
                web.get("/v1/contents/{digest}", self._signed(self._content, ["validator"])),
                web.get("/v1/missed/{key}", self._signed(self._missed, ["validator"])),
                web.get("/v1/curricula/{digest}", self._signed(self._curriculum, ["worker", "validator"])),
                *(self._transfer_routes(self.transfers) if self.transfers else self._file_routes()),
                web.post("/v1/verdicts", self._signed(self._judge, ["validator"], verdict_bytes)),
                web.post("/v1/policies", self._signed(_report(m.Policy, pool.learning.published), ["origin"])),
                web.get("/v1/ledger/{after}", self._signed(self._ledger, get_args(Role))),
                web.post("/v1/bookings", self._answering(self._book)),
                web.post("/v1/heads", self._signed(self._head, ["validator"])),
                web.get("/v1/batches/{step}", self._signed(self._batch, ["learner"])),
                web.post(
                    "/v1/steps",
                    self._signed(_report(m.StepReport, pool.learning.trained), ["learner"], MAX_REPORT_BYTES),
                ),
                web.post(
                    "/v1/evaluations", self._signed(_report(m.Evaluation, pool.learning.evaluated), ["evaluator"])
                ),
            ]
        )
        return app

    # --- open to all -------------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"run": self.run, "protocol": messages.VERSION})

    async def _run(self, request: web.Request) -> web.Response:
        private = {"coordinator": {"database"}, "ledger": {"rpc", "key_file"}}  # nobody else's matter
        config = self.config.model_dump(exclude=private)
        descriptor = messages.RunDescriptor(
            protocol=messages.VERSION, run=self.run, config=config, keys=self.pool.members.keys()
        )
        signed = Signed.make(self.identity, descriptor.model_dump_json(), domain="run")
        return web.json_response(text=signed.model_dump_json())

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(text=self.status.get())

    async def _history(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not CURSOR.fullmatch(after):
            return refusal(400, f"after={after[:40]!r} is not a cursor; start with 0")
        return web.json_response(text=self.pool.history.after(int(after)).model_dump_json())

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.get(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    # --- members -----------------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> Answer:
        """The nonce is spent last: only who may join can make the coordinator write anything."""
        head = self.admission.admit(request, None, MAX_SMALL_BYTES)
        body = await read_body(request.content.readany, head, MAX_SMALL_BYTES)
        registration = messages.Registration.model_validate_json(body)
        if registration.protocol != messages.VERSION:
            raise PoolError(
                f"this pool speaks protocol {messages.VERSION}, this node {registration.protocol}: install the same version "
                "of Shoal as the pool's operator",
                400,
            )
        payload = open_payload(registration.invite, self.identity.public, self.run)
        if payload.open and self.settlement:
            await self.settlement.look(head.key, registration.payer)
        self.pool.members.may_register(head.key, payload, registration.capability)
        head.spend(self.admission.nonces)
        return self.pool.members.register(
            head.key, payload, registration.url, registration.capability, registration.payer
        )

    async def _book(self, request: web.Request) -> Answer:
        """By the operator, who holds this coordinator's key."""
        head = self.admission.admit(request, None, MAX_SMALL_BYTES)
        stakes = self.pool.members.stakes
        if head.key != self.identity.public:
            raise PoolError("only the operator books stakes", 403)
        head.spend(self.admission.nonces)
        body = await read_body(request.content.readany, head, MAX_SMALL_BYTES)
        if not isinstance(stakes, BookedStakes):
            raise PoolError("this pool's stakes are in a contract: see `shoal stake --help`")
        stakes.book(messages.Booking.model_validate_json(body))
        return messages.Ok()

    async def _heartbeat(self, request: Request) -> Answer:
        answer = self.pool.members.heartbeat(request.key, messages.Heartbeat.model_validate_json(request.body))
        if answer.state == "evicted":
            return answer
        return answer.model_copy(update={"reader_grant": self._reader_grant(request.key)})

    def _reader_grant(self, key: str) -> str:
        """One that is good for half of its time at least: signing is a good part of what a heartbeat costs."""
        now_s, (until_s, grant) = time.time(), self._grants.get(key, (0.0, ""))
        if not READER_GRANT_S / 2 < until_s - now_s <= READER_GRANT_S:  # or the clock was set back
            until_s, grant = (
                now_s + READER_GRANT_S,
                issue(self.identity.private_key, key, self.run, now_s + READER_GRANT_S),
            )
            self._grants[key] = until_s, grant
        return grant

    async def _drain(self, request: Request) -> Answer:
        self.pool.members.drain(request.key)
        return messages.Ok()

    async def _task_data(self, request: Request) -> Answer:
        """The manifest of the task set, one of its chunks, or a reward's source: immutable, and checked by who asks."""
        name = request.match["sha256"]
        if not SHA256.fullmatch(name) or not (self.tasks / name).is_file():
            raise PoolError(f"no task data {name[:64]!r} here", 404)
        return web.FileResponse(self.tasks / name)

    # --- rollout files -----------------------------------------------------------------------------------------------

    async def _put_submission(self, request: web.Request) -> Answer:
        submissions = self.pool.submissions
        return await self._receive(request, "worker", "submissions", submissions.may_upload, submissions.uploaded)

    async def _put_accepted(self, request: web.Request) -> Answer:
        submissions = self.pool.submissions
        return await self._receive(
            request, "validator", "accepted", submissions.may_store_accepted, submissions.accepted_stored
        )

    async def _receive(
        self,
        request: web.Request,
        role: Role,
        kind: str,
        check_grant: Callable[[str, str], None],
        stored: Callable[[str, str, str], None],
    ) -> Answer:
        """Stream a file into the store. Only a key with the grant is read from, while the grant is valid, up to its size."""
        limit_bytes, id = self.config.coordinator.max_submission_bytes, request.match_info["id"]
        head = self.admission.admit(request, [role], limit_bytes)
        check_grant(head.key, id)
        with self.pace.under_way(head.key), self._latest(kind, id) as check_latest, self.store.receive(kind) as file:
            size_bytes = 0
            async for piece in body_pieces(request.content.readany, head, limit_bytes):
                check_latest()  # the client lost its connection and sends again
                check_grant(head.key, id)  # a slow upload ends with its grant, and frees its space
                await asyncio.to_thread(file.write, piece)
                size_bytes += len(piece)
            async with self._storing:  # else the files of all uploads that end together would be kept
                check_latest()
                check_grant(head.key, id)  # also after the last piece: without a grant nothing is kept
                content_hash = await asyncio.to_thread(file.commit)
                stored(head.key, id, content_hash)
        return messages.Stored(size_bytes=size_bytes, hash=content_hash)

    @contextmanager
    def _latest(self, kind: str, id: str) -> Iterator[Callable[[], None]]:
        """Around an upload. Yields what raises PoolError once another upload for the same grant has started."""
        upload = self._uploads[kind, id] = object()

        def check() -> None:
            if self._uploads.get((kind, id)) is not upload:
                raise PoolError(f"another upload of {id} has started")

        try:
            yield check
        finally:
            if self._uploads.get((kind, id)) is upload:
                del self._uploads[kind, id]

    def _file_routes(self) -> list[web.RouteDef]:
        """Where files are in the folder: they are sent and fetched here."""
        return [
            web.put("/v1/submissions/{id}", self._answering(self._put_submission)),
            web.get("/v1/submissions/{id}", self._signed(self._get_submission, ["validator"])),
            web.put("/v1/accepted/{id}", self._answering(self._put_accepted)),
            web.get("/v1/accepted/{id}", self._signed(self._get_accepted, ["learner"])),
        ]

    def _transfer_routes(self, transfers: Transfers) -> list[web.RouteDef]:
        """Where files are in a bucket: what stands in the place of sending and fetching them here."""
        submissions = self.pool.submissions

        def routes(
            kind: Kind,
            sender: Role,
            reader: Role,
            right: Callable[[str, str], None],
            record: Callable[[str, str, str], None],
            hash_of: Callable[[str], str],
        ) -> list[web.RouteDef]:
            async def grant(request: Request) -> Answer:
                file = messages.Announced.model_validate_json(request.body)
                return transfers.grant(request.key, kind, request.match["id"], file, right)

            async def stored(request: Request) -> Answer:
                file = messages.Announced.model_validate_json(request.body)
                return await transfers.stored(request.key, kind, request.match["id"], file, right, record)

            async def link(request: Request) -> Answer:
                return transfers.link(kind, hash_of(request.match["id"]), request.match["id"])

            path = f"/v1/{kind}/{{id}}"
            return [
                web.post(f"{path}/grant", self._signed(grant, [sender])),
                web.post(f"{path}/stored", self._signed(stored, [sender])),
                web.get(f"{path}/link", self._signed(link, [reader])),
            ]

        return [
            *routes(
                "submissions",
                "worker",
                "validator",
                submissions.may_upload,
                submissions.uploaded,
                lambda id: submissions.hashes(id)[0],
            ),
            *routes(
                "accepted",
                "validator",
                "learner",
                submissions.may_store_accepted,
                submissions.accepted_stored,
                lambda id: submissions.hashes(id)[1],
            ),
        ]

    async def _get_submission(self, request: Request) -> Answer:
        content_hash, _ = self.pool.submissions.hashes(request.match["id"])
        return await asyncio.to_thread(self.store.get, "submissions", content_hash)

    async def _get_accepted(self, request: Request) -> Answer:
        _, content_hash = self.pool.submissions.hashes(request.match["id"])
        return await asyncio.to_thread(self.store.get, "accepted", content_hash)

    # --- checking and learning ---------------------------------------------------------------------------------------

    async def _claim(self, request: Request) -> Answer:
        asked = messages.ClaimRequest.model_validate_json(request.body)
        return self.pool.submissions.claim(request.key, asked.most)

    async def _content(self, request: Request) -> Answer:
        return self.pool.submissions.content_owner(request.match["digest"])

    async def _missed(self, request: Request) -> Answer:
        if not SHA256.fullmatch(request.match["key"]):
            raise PoolError(f"{request.match['key'][:64]!r} is not a key", 400)
        return self.pool.submissions.missed(request.match["key"])

    async def _curriculum(self, request: Request) -> Answer:
        return self.pool.curriculum.page(request.match["digest"])

    async def _judge(self, request: Request) -> Answer:
        self.pool.submissions.judge(request.key, messages.Verdict.model_validate_json(request.body))
        return messages.Ok()

    async def _ledger(self, request: Request) -> Answer:
        if not CURSOR.fullmatch(request.match["after"]):
            raise PoolError(f"{request.match['after'][:40]!r} is not the number of an entry", 400)
        return web.Response(body=self.pool.witnesses.entries(int(request.match["after"])))

    async def _head(self, request: Request) -> Answer:
        self.pool.witnesses.witnessed(request.key, Signed.model_validate_json(request.body))
        return messages.Ok()

    async def _batch(self, request: Request) -> Answer:
        if not STEP.fullmatch(request.match["step"]):
            raise PoolError(f"{request.match['step'][:40]!r} is not a step", 400)
        return self.pool.batches.of_step(int(request.match["step"]))

    # --- every signed request ----------------------------------------------------------------------------------------

    def _signed(
        self, handler: Handler, roles: Sequence[Role], limit_bytes: int = MAX_SMALL_BYTES
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A route that answers `roles` and takes a small body."""

        async def respond(request: web.Request) -> Answer:
            head = self.admission.admit(request, roles, limit_bytes)
            with self.pace.under_way(head.key):
                body = await read_body(request.content.readany, head, limit_bytes)
                return await handler(Request(head.key, body, dict(request.match_info)))

        return self._answering(respond)

    def _answering(
        self, respond: Callable[[web.Request], Awaitable[Answer]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Turn an answer into a response, and an error that a message explains into its status."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                found = await respond(request)
            except (web.RequestPayloadError, ConnectionResetError) as error:  # broken encoding; a client that left
                return refusal(400, str(error))
            except SignatureError as error:
                return refusal(401, str(error))
            except InviteError as error:
                return refusal(403, str(error))
            except ValidationError as error:
                first = error.errors()[0]
                return refusal(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            except PoolError as error:
                return refusal(error.status, str(error))
            except (StoreError, DatabaseFullError) as error:
                return refusal(507, str(error))
            except DatabaseLostError as error:
                return refusal(503, str(error))
            if isinstance(found, web.StreamResponse):
                return found
            if isinstance(found, bytes):
                return web.Response(body=found, content_type="application/vnd.apache.parquet")
            return web.json_response(text=found.model_dump_json())

        return answer


def _report(model: type[M], record: Callable[[M], None]) -> Handler:
    """A route's handler that records a report of this model."""

    async def handler(request: Request) -> Answer:
        record(model.model_validate_json(request.body))
        return messages.Ok()

    return handler
