"""Rollout files: a worker's submissions and a validator's accepted files, sent to the coordinator or to the pool's bucket.

Invariant: a file is read only from a key with the grant, while the grant is valid, up to its size; of all uploads for one
grant at most one is kept. Called by `routes`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.http.admission import body_pieces
from shoal.coordinator.http.answering import Answer, Answering, Request, answering
from shoal.coordinator.http.transfers import Kind, Transfers
from shoal.coordinator.pool import Pool
from shoal.coordinator.state.database import PoolError
from shoal.protocol import messages
from shoal.protocol.messages import Role
from shoal.store.folder import Folder


class FileRoutes:
    def __init__(
        self, config: Config, pool: Pool, store: Folder, transfers: Transfers | None, answering: Answering
    ) -> None:
        """`transfers`: None: this process takes and gives the files itself."""
        self.config = config
        self.pool = pool
        self.store = store
        self.transfers = transfers
        self.admission, self.pace, self._signed = answering.admission, answering.pace, answering.signed
        self._uploads: dict[tuple[str, str], object] = {}  # kind and submission id -> the upload in progress
        self._storing = asyncio.Lock()  # one upload at a time gets its name and its place in the database

    def routes(self) -> list[web.RouteDef]:
        return self._transfer_routes(self.transfers) if self.transfers else self._file_routes()

    async def put_submission(self, request: web.Request) -> Answer:
        submissions = self.pool.submissions
        return await self._receive(request, "worker", "submissions", submissions.may_upload, submissions.uploaded)

    async def put_accepted(self, request: web.Request) -> Answer:
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
            web.put("/v1/submissions/{id}", answering(self.put_submission)),
            web.get("/v1/submissions/{id}", self._signed(self._get_submission, ["validator"])),
            web.put("/v1/accepted/{id}", answering(self.put_accepted)),
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
