"""The coordinator's HTTP face: a table of routes, each of which checks who asks and calls the pool for it.

Invariant: only `/healthz`, `/metrics`, `/v1/run`, `/v1/status` and `/v1/history` answer without a fresh signature by a
registered key of a role that the table names. Called by every node; started by `shoal coordinator`. It also serves the
store's folder.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.config import Config
from shoal.coordinator.database import PoolError
from shoal.coordinator.nonces import SqliteNonces
from shoal.coordinator.pool import Pool
from shoal.ledger.chain import Ledger
from shoal.protocol import messages
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import InviteError, open_payload
from shoal.protocol.signing import SignatureError, split_target, verify_request
from shoal.shardcast.serve.guard import issue
from shoal.store.folder import Folder, StoreError

M = TypeVar("M", bound=BaseModel)
Handler = Callable[["Request"], Awaitable[BaseModel | bytes]]
READER_TOKEN_S = 600.0  # renewed with each heartbeat
MAX_JSON_BYTES = 1 << 20
STEP = CURSOR = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class Request:
    """A verified request: who signed it, with what body, for which path parameters."""

    key: str
    body: bytes
    match: dict[str, str]


class Coordinator:
    def __init__(self, config: Config, run: str, identity: Identity, folder: Path) -> None:
        self.config = config
        self.run = run
        self.identity = identity
        folder.mkdir(parents=True, exist_ok=True)
        database = _open(folder / "pool.sqlite")
        self.pool = Pool(database, Ledger(database, identity, clock=time.time), config, run, time.time)
        self.nonces = SqliteNonces(_open(folder / "nonces.sqlite"))
        self.store = Folder(folder / "store")

    def app(self) -> web.Application:
        m, limit = messages, self.config.coordinator.max_submission_bytes
        every = ("learner", "origin", "relay", "worker", "validator", "evaluator")
        app = web.Application(client_max_size=max(limit, MAX_JSON_BYTES))
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/v1/run", self._run),
                web.get("/v1/status", self._status),
                web.get("/v1/history", self._history),
                web.get("/metrics", self._metrics),
                web.post("/v1/register", self._signed(self._register, roles=None)),
                web.post("/v1/heartbeat", self._signed(self._heartbeat, every)),
                web.put("/v1/submissions/{id}", self._signed(self._put_submission, ("worker",))),
                web.post("/v1/claims", self._signed(self._claim, ("validator",))),
                web.get("/v1/submissions/{id}", self._signed(self._get_submission, ("validator",))),
                web.get("/v1/contents/{digest}", self._signed(self._content, ("validator",))),
                web.put("/v1/accepted/{id}", self._signed(self._put_accepted, ("validator",))),
                web.post("/v1/verdicts", self._signed(self._judge, ("validator",))),
                web.post("/v1/policies", self._signed(self._note(m.Policy, self.pool.learning.published), ("origin",))),
                web.get("/v1/batches/{step}", self._signed(self._batch, ("learner",))),
                web.get("/v1/accepted/{id}", self._signed(self._get_accepted, ("learner",))),
                web.post("/v1/steps", self._signed(self._note(m.StepReport, self.pool.learning.trained), ("learner",))),
                web.post(
                    "/v1/evaluations",
                    self._signed(self._note(m.Evaluation, self.pool.learning.evaluated), ("evaluator",)),
                ),
            ]
        )
        return app

    # --- open to all -------------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"run": self.run, "protocol": messages.VERSION})

    async def _run(self, request: web.Request) -> web.Response:
        descriptor = messages.RunDescriptor(
            protocol=messages.VERSION, run=self.run, config=self.config.model_dump(), keys=self.pool.members.keys()
        )
        signed = Signed.make(self.identity, descriptor.model_dump_json(), domain="run")
        return web.json_response(text=signed.model_dump_json())

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(text=self.pool.status().model_dump_json())

    async def _history(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not CURSOR.fullmatch(after):
            return _error(400, f"after={after[:40]!r} is not a cursor; start with 0")
        return web.json_response(text=self.pool.history.after(int(after)).model_dump_json())

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.pool.metrics(), content_type="text/plain", charset="utf-8")

    # --- members -----------------------------------------------------------------------------------------------------

    async def _register(self, request: Request) -> BaseModel:
        registration = messages.Registration.model_validate_json(request.body)
        payload = open_payload(registration.invite, self.identity.public, self.run)
        return self.pool.members.register(request.key, payload, registration.url)

    async def _heartbeat(self, request: Request) -> BaseModel:
        answer = self.pool.members.heartbeat(request.key, messages.Heartbeat.model_validate_json(request.body))
        if answer.state == "evicted":
            return answer
        token = issue(self.identity.private_key, request.key, self.run, time.time() + READER_TOKEN_S)
        return answer.model_copy(update={"reader_token": token})

    # --- rollout files -----------------------------------------------------------------------------------------------

    async def _put_submission(self, request: Request) -> BaseModel:
        self.pool.submissions.may_upload(request.key, request.match["id"])
        stored = await self._put("submissions", request.body)
        self.pool.submissions.uploaded(request.key, request.match["id"], stored.hash)
        return stored

    async def _put_accepted(self, request: Request) -> BaseModel:
        stored = await self._put("accepted", request.body)
        self.pool.submissions.accepted_stored(request.key, request.match["id"], stored.hash)
        return stored

    async def _put(self, kind: str, body: bytes) -> messages.Stored:
        content_hash = await asyncio.to_thread(self.store.put, kind, body)
        return messages.Stored(size_bytes=len(body), hash=content_hash)

    async def _get_submission(self, request: Request) -> bytes:
        content_hash, _ = self.pool.submissions.hashes(request.match["id"])
        return await asyncio.to_thread(self.store.get, "submissions", content_hash)

    async def _get_accepted(self, request: Request) -> bytes:
        _, content_hash = self.pool.submissions.hashes(request.match["id"])
        return await asyncio.to_thread(self.store.get, "accepted", content_hash)

    # --- checking and learning ---------------------------------------------------------------------------------------

    async def _claim(self, request: Request) -> BaseModel:
        asked = messages.ClaimRequest.model_validate_json(request.body)
        return self.pool.submissions.claim(request.key, asked.most)

    async def _content(self, request: Request) -> BaseModel:
        return self.pool.submissions.content_owner(request.match["digest"])

    async def _judge(self, request: Request) -> BaseModel:
        self.pool.submissions.judge(request.key, messages.Verdict.model_validate_json(request.body))
        return messages.Ok()

    async def _batch(self, request: Request) -> BaseModel:
        if not STEP.fullmatch(request.match["step"]):
            raise PoolError(f"{request.match['step'][:40]!r} is no step", 400)
        return self.pool.batches.of_step(int(request.match["step"]))

    def _note(self, model: type[M], note: Callable[[M], None]) -> Handler:
        async def handler(request: Request) -> BaseModel:
            note(model.model_validate_json(request.body))
            return messages.Ok()

        return handler

    # --- every signed request ----------------------------------------------------------------------------------------

    def _signed(
        self, handler: Handler, roles: tuple[str, ...] | None
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: verify the signature, then the role (None: a stranger may ask), then answer."""

        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                body = await request.read()
                path, query = split_target(request.raw_path)
                key = verify_request(
                    method=request.method,
                    path=path,
                    query=query,
                    headers=request.headers,
                    body=body,
                    audience=self.run,
                    now_s=time.time(),
                    nonces=self.nonces,
                )
                if roles is not None and self.pool.members.role(key) not in roles:
                    raise PoolError(f"only {' or '.join(roles)} may ask for {request.path}", 403)
                answer = await handler(Request(key, body, dict(request.match_info)))
            except web.RequestPayloadError as error:  # a content-encoding that the body is not in
                return _error(400, str(error))
            except SignatureError as error:
                return _error(401, str(error))
            except InviteError as error:
                return _error(403, str(error))
            except ValidationError as error:
                first = error.errors()[0]
                return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            except PoolError as error:
                return _error(error.status, str(error))
            except StoreError as error:
                return _error(507, str(error))
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="application/vnd.apache.parquet")
            return web.json_response(text=answer.model_dump_json())

        return respond


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection
