"""Rollout files: a worker's submissions and a validator's accepted files, sent to the coordinator or to the pool's bucket.

Invariant: a file is read only from a key with the grant, while the grant is valid, up to its size. It gets its name only
once the pool takes it, so of all uploads for one grant at most one is kept, and what is refused leaves nothing. What an
upload sent in vain counts against its sender. Called by `routes`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.http.transfers import FileKind, Transfers
from shoal.coordinator.pool import Pool
from shoal.coordinator.state.database import PoolError
from shoal.protocol import messages
from shoal.protocol.server import Admission, Answer, Request, body_pieces
from shoal.store.folder import Folder

UPLOADS = 2  # for one grant at once: the newest, and one whose client lost its connection


class FileRoutes:
    def __init__(
        self, config: Config, pool: Pool, store: Folder, transfers: Transfers | None, admission: Admission
    ) -> None:
        """`transfers`: None: this process takes and gives the files itself."""
        self.config = config
        self.store = store
        self.transfers = transfers
        self.admission, self._signed = admission, admission.signed
        self._uploads: dict[tuple[str, str], list[asyncio.Event]] = {}  # by kind and submission: set once replaced
        self._storing = asyncio.Lock()  # one upload at a time gets its name and its place in the database
        pooled = pool.submissions
        self.submissions = FileKind(
            "submissions",
            sender="worker",
            reader="validator",
            may_store=pooled.may_upload,
            stored=pooled.uploaded,
            hash_of=lambda id: pooled.hashes(id)[0],
            is_used=lambda content_hash: pool.db.submissions.has_file("submissions", content_hash),
        )
        self.accepted = FileKind(
            "accepted",
            sender="validator",
            reader="learner",
            may_store=pooled.may_store_accepted,
            stored=pooled.accepted_stored,
            hash_of=lambda id: pooled.hashes(id)[1],
            is_used=lambda content_hash: pool.db.submissions.has_file("accepted", content_hash),
        )

    def routes(self) -> list[web.RouteDef]:
        found: list[web.RouteDef] = []
        for kind in (self.submissions, self.accepted):
            found += self._transfer_routes(self.transfers, kind) if self.transfers else self._file_routes(kind)
        return found

    async def receive(self, request: web.Request, kind: FileKind) -> Answer:
        """Stream a file into the store. Only a key with the grant is read from, while the grant is valid, up to its size."""
        limit_bytes, id = self.config.coordinator.max_submission_bytes, request.match_info["id"]
        head = self.admission.admit(request, [kind.sender], limit_bytes)
        kind.may_store(head.key, id, "")
        with (
            self._upload(kind, id) as check_newest,
            self._counted(head.key) as received,
            self.store.receive(kind.name) as file,
        ):
            async for piece in body_pieces(request.content.readany, head, limit_bytes):
                check_newest()  # the client lost its connection and sends again
                kind.may_store(head.key, id, "")  # a slow upload ends with its grant, and frees its space
                received.append(len(piece))
                await asyncio.to_thread(file.write, piece)
            async with self._storing:  # else the files of all uploads that end together would be kept
                check_newest()
                kind.may_store(head.key, id, file.content_hash)  # before it has its name: a refused one leaves nothing
                content_hash = await asyncio.to_thread(file.commit)
                await kind.record(head.key, id, content_hash, self.store.remove)
        return messages.Stored(size_bytes=sum(received), hash=content_hash)

    @contextmanager
    def _upload(self, kind: FileKind, id: str) -> Iterator[Callable[[], None]]:
        """Around an upload. Yields what raises PoolError once another upload for the same grant has started.

        Raises PoolError with status 429 if there are UPLOADS: each may hold a file until its sender's next piece.
        """
        uploads, replaced = self._uploads.setdefault((kind.name, id), []), asyncio.Event()
        if len(uploads) >= UPLOADS:
            raise PoolError(f"{UPLOADS} uploads of {id} are under way; send it again", 429)
        for earlier in uploads:
            earlier.set()
        uploads.append(replaced)

        def check() -> None:
            if replaced.is_set():
                raise PoolError(f"another upload of {id} has started")

        try:
            yield check
        finally:
            uploads.remove(replaced)
            if not uploads:
                del self._uploads[kind.name, id]

    @contextmanager
    def _counted(self, key: str) -> Iterator[list[int]]:
        """Around an upload, whose pieces' sizes are added to what this yields: they count against its sender if it fails."""
        received: list[int] = []
        try:
            yield received
        except BaseException:
            self.admission.pace.moved(key, sum(received))
            raise

    def _file_routes(self, kind: FileKind) -> list[web.RouteDef]:
        """Where files are in the folder: they are sent and fetched here."""

        async def get(request: Request) -> Answer:
            return await asyncio.to_thread(self.store.get, kind.name, kind.hash_of(request.match["id"]))

        async def put(request: web.Request) -> Answer:
            return await self.receive(request, kind)

        path = f"/v1/{kind.name}/{{id}}"
        return [web.put(path, self.admission.answering(put)), web.get(path, self._signed(get, [kind.reader]))]

    def _transfer_routes(self, transfers: Transfers, kind: FileKind) -> list[web.RouteDef]:
        """Where files are in a bucket: what stands in the place of sending and fetching them here."""

        async def grant(request: Request) -> Answer:
            file = messages.Announced.model_validate_json(request.body)
            return transfers.grant(request.key, kind, request.match["id"], file)

        async def stored(request: Request) -> Answer:
            file = messages.Announced.model_validate_json(request.body)
            return await transfers.stored(request.key, kind, request.match["id"], file)

        async def link(request: Request) -> Answer:
            return transfers.link(kind, request.match["id"])

        path = f"/v1/{kind.name}/{{id}}"
        return [
            web.post(f"{path}/grant", self._signed(grant, [kind.sender])),
            web.post(f"{path}/stored", self._signed(stored, [kind.sender])),
            web.get(f"{path}/link", self._signed(link, [kind.reader])),
        ]
