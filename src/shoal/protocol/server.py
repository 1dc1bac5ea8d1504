"""Middleware of every signed route, at the coordinator and at the sites' meeting (`diloco`): admission, body, response.

    head verified -> rates, role, length -> nonce spent -> bounded body -> handler -> answer signed and sent

Invariants: if a request has no valid signature or exceeds a rate, or if its key lacks the route's role, its body is not
read and nothing is written. A handler gets a body only if it is the signed one and within its route's limit. The run
signs every answer to a signed request, refusals included, because a node believes no other. A connection stays open
only if a member signed its last request; any other connection is closed after its answer. So strangers hold no idle
connections, and each refusal costs them a new connection. The more refusals a member or an address causes, the longer
each refusal is delayed. The rest of a refused body is read at a bounded rate and discarded. So a sender that reads the
answer only after sending its body still gets the refusal, and a flood of bodies costs little time. Expected errors get
an HTTP status. Any other error is a bug; its request gets a 500, and other routes keep working.

A listener has one `Front`, and each run has one `Admission`. Limits are in `pace`.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.errors import ShoalError, first_problem
from shoal.files import write_file
from shoal.protocol.identity import Identity
from shoal.protocol.pace import LARGE_BYTES, Pace, Refusal, Strangers, Unread
from shoal.protocol.signing import NonceStore, SignatureError, SignedHead, sign_answer, verify_head
from shoal.shardcast.connections import LOG, PATIENCE, Listener, is_foreign, keep_open, network, started

MAX_SMALL_BYTES = 4 << 10  # enough for a few fields, as in a registration, claim, version or evaluation
BODY_TIMEOUT_S = 30.0  # for a whole message, and for the next piece of a file
PIECE_BYTES = 64 << 10  # size of each piece of an upload; the last piece may be smaller
STRANGER_S = 10.0  # for a stranger's whole body
THREAD_BYTES = 1 << 20  # a larger answer is hashed in a thread
LINGER_S = 30.0  # how long the rest of a refused body is read
TOO_EARLY = 425  # HTTP status of a request that may be a replay (RFC 8470)
MAX_CONNECTIONS = 4096  # fewer if the process may not open twice as many files
BACKLOG = 128  # connections that wait to be accepted; asyncio accepts this number before it does anything else
READ_BUFFER_BYTES = 64 << 10  # per connection; a connection may hold up to twice as much

EVICTED = "evicted"  # the role of a banned key; all its requests count as rare
MEMBER = web.RequestKey("member", str)  # the key of the member that signed the request
COVERED = web.RequestKey("covered", bool)  # the request's signature covers all that the answer depends on
SLOT = web.RequestKey("slot", contextlib.ExitStack)  # resources of a request, released once its answer is sent
IDENTITY = web.AppKey("identity", Identity)  # signs the answers of an application

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[], Awaitable[bytes]]  # returns the next piece of a body, b"" at its end
Answer = BaseModel | bytes | web.StreamResponse  # bytes: a file, which does not count against its reader's rate


@dataclass(frozen=True)
class Request:
    """A verified request: its signed head, body, path parameters, query, and the address that sent it."""

    head: SignedHead
    body: bytes
    match: Mapping[str, str]
    query: Mapping[str, str]
    address: str

    @property
    def key(self) -> str:
        return self.head.key


Handler = Callable[[Request], Awaitable[Answer]]


class UncoveredError(Refusal):
    """A refusal because of a part of the request that its signature does not cover. It is not signed."""


class Front:
    def __init__(self, strangers: Strangers | None = None, unread: Unread | None = None) -> None:
        self.strangers = strangers or Strangers()
        self.unread = unread or Unread()
        self.names: set[str] | None = None  # host names of this server besides loopback's; None: any

    def attach(self, application: web.Application) -> web.Application:
        """Add the middleware to this application, for its sub-applications too. Return it."""
        application.middlewares.append(self._pass)
        return application

    @web.middleware
    async def _pass(self, request: web.Request, handler: Route) -> web.StreamResponse:
        with contextlib.ExitStack() as sending:
            request[SLOT] = sending
            try:
                response = await handler(request)
            except web.HTTPException as error:  # no such path or method
                request[COVERED] = error.status in (404, 405)
                response = refusal(error.status, error.reason)
            key, address, size = request.get(MEMBER), network(request.remote or ""), _size_bytes(response)
            try:
                sending.enter_context(self.unread.answer(key or address, size, member=key is not None))
            except Refusal as error:
                response = refusal(error.status, str(error))
            if key is None or response.status == 429:
                response.force_close()
            if response.status >= 400:
                await asyncio.sleep(self.strangers.refusal_hold_s(key or address))
            await _sign(request, response)
            if response.status >= 400 or size > LARGE_BYTES:
                with contextlib.suppress(ConnectionError):  # the client has left
                    await response.prepare(request)
                    await response.write_eof()  # returns once all is sent, except what the connection's buffers hold
        if response.status >= 400:
            await self._discard(request)
        return response

    async def _discard(self, request: web.Request) -> None:
        """Discard the rest of a refused body, until it ends, its sender leaves, or LINGER_S have passed."""
        with contextlib.suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
            async with asyncio.timeout(LINGER_S):
                while piece := await request.content.readany():
                    await asyncio.sleep(self.strangers.discard_hold_s(len(piece)))

    def open_to_all(self, handler: Route) -> Route:
        """Return a route that needs no signature."""

        async def respond(request: web.Request) -> web.StreamResponse:
            address, request[COVERED] = network(request.remote or ""), True
            if self.names is not None and is_foreign(request, self.names):
                return refusal(421, "this server is not available under this host name")
            try:
                self.strangers.reader(address)
            except Refusal as error:
                return refusal(error.status, str(error))
            keep_open(request)
            response = await handler(request)
            self.strangers.answered(address, _size_bytes(response))
            return response

        return respond


@dataclass(frozen=True)
class Admission:
    """Authorises requests to one run's signed routes."""

    run: str
    nonces: NonceStore
    role_of: Callable[[str], str | None]
    clock: Callable[[], float]
    pace: Pace
    statuses: Mapping[type[ShoalError], int] = field(default_factory=dict)  # HTTP status by kind of error

    def admit(
        self,
        request: web.Request,
        roles: Collection[str] | None,
        limit_bytes: int,
        *,
        large: bool = False,
        rare: bool = False,
    ) -> SignedHead:
        """Verify the headers: signature, rate, role, encoding and length of the body.

        The request counts as in progress until it is answered. `roles` None allows any key, and leaves it to the
        handler to spend the nonce once it knows that the key is admissible. If the nonce were spent here, strangers
        could fill the disk with nonces. `large`, `rare`: see `pace`. Raise SignatureError, or Refusal with status 403,
        413, 415 or 429.
        """
        head = verify_head(request.method, request.raw_path, request.headers, audience=self.run, now_s=self.clock())
        request[COVERED] = True
        role = self.role_of(head.key)
        if role is not None:
            request[MEMBER] = head.key
            keep_open(request)
            # This counts refused requests, too: their signatures cost as much to verify.
            self.pace.member(head.key, rare=rare or role == EVICTED)
        if roles is not None and role not in roles:
            if role == EVICTED:
                raise Refusal("this key was evicted")  # with status 409, for which a worker drops only the upload
            raise Refusal(f"only {' or '.join(roles)} may ask for {request.path}", 403)
        if "Content-Encoding" in request.headers:
            raise UncoveredError("the body must come without content-encoding", 415)
        if (request.content_length or 0) > limit_bytes:
            raise UncoveredError(
                f"a body of {request.content_length} bytes; at most {limit_bytes} are allowed here", 413
            )
        if roles is not None:
            head.spend(self.nonces)
        request[SLOT].enter_context(self.pace.in_progress(head.key, large=large))
        return head

    def signed(
        self,
        handler: Handler,
        roles: Collection[str] | None,
        limit_bytes: int = MAX_SMALL_BYTES,
        *,
        large: bool = False,
        rare: bool = False,
    ) -> Route:
        """Return a route for `roles` (None: any key), with a body of at most `limit_bytes`."""

        async def respond(request: web.Request) -> Answer:
            head = self.admit(request, roles, limit_bytes, large=large, rare=rare)
            timeout_s = None if large else BODY_TIMEOUT_S if MEMBER in request else STRANGER_S
            body = await read_body(request.content.readany, head, limit_bytes, timeout_s)
            answer = await handler(
                Request(head, body, request.match_info, request.query, network(request.remote or ""))
            )
            response = _response(answer)
            if not isinstance(answer, bytes | web.FileResponse):
                self.pace.answered(head.key, _size_bytes(response))
            return response

        return self.answering(respond)

    def answering(self, respond: Callable[[web.Request], Awaitable[Answer]]) -> Route:
        """Return a route that turns an answer into a response, and an expected error into a refusal."""

        async def route(request: web.Request) -> web.StreamResponse:
            try:
                return _response(await respond(request))
            except (web.RequestPayloadError, ConnectionResetError) as error:  # bad encoding, or the client has left
                request[COVERED] = False
                return refusal(400, str(error))
            except SignatureError as error:
                request[COVERED] = False
                return refusal(TOO_EARLY if error.reason in ("replayed", "too old") else 401, str(error))
            except ValidationError as error:
                return refusal(400, first_problem(error))
            except UncoveredError as error:
                request[COVERED] = False
                return refusal(error.status, str(error))
            except Refusal as error:
                return refusal(error.status, str(error))
            except tuple(self.statuses) as error:
                status = next(status for kind, status in self.statuses.items() if isinstance(error, kind))
                return refusal(status, str(error))

        return route


async def read_body(read: Read, head: SignedHead, limit_bytes: int, timeout_s: float | None = BODY_TIMEOUT_S) -> bytes:
    """Return the verified body, within `timeout_s` if there is a limit. Raise SignatureError, Refusal (408, 413)."""
    try:
        async with asyncio.timeout(timeout_s):
            return b"".join(
                [piece async for piece in body_pieces(read, head, limit_bytes, timeout_s or BODY_TIMEOUT_S)]
            )
    except TimeoutError as error:
        raise UncoveredError(f"the body did not arrive within {timeout_s:g} s; send the request again", 408) from error


async def body_pieces(
    read: Read, head: SignedHead, limit_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> AsyncIterator[bytes]:
    """Yield the body in pieces; they are verified when the iteration ends. Raise as `read_body` does.

    PIECE_BYTES, or the body's end, must arrive within `timeout_s`. So a sender that drips its body is refused, and one
    that cuts it into tiny segments does not make the caller handle each of them.
    """
    size_bytes, digest = 0, sha256()
    while True:
        collected, most_bytes = bytearray(), min(PIECE_BYTES, limit_bytes + 1 - size_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                while len(collected) < most_bytes and (arrived := await read()):
                    collected += arrived
        except TimeoutError as error:
            why = f"only {len(collected)} bytes of the body arrived in {timeout_s:g} s; send the request again"
            raise UncoveredError(why, 408) from error
        if not (piece := bytes(collected)):
            break
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise UncoveredError(f"a body of more than {limit_bytes} bytes", 413)
        digest.update(piece)
        yield piece
    head.check_body(digest.digest(), size_bytes)


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


async def listen(
    application: web.Application,
    host: str,
    port: int,
    *,
    per_address: int,
    total: int = MAX_CONNECTIONS,
) -> tuple[web.AppRunner, int]:
    """Serve an application that has a front, with at most `per_address` connections from one address.

    Return the runner, whose `cleanup` ends it, and the port. Raise OSError if the port is taken.
    """
    listener = Listener(host, port, PATIENCE, per_address=per_address, total=total)
    runner = await started(
        application,
        listener,
        backlog=BACKLOG,
        logger=LOG,
        lingering_time=0,  # `Front` reads the rest of a refused body
        read_bufsize=READ_BUFFER_BYTES,
    )
    return runner, int(listener.getsockname()[1])


async def on_last_port(
    start: Callable[[int], Awaitable[tuple[web.AppRunner, int]]], port: int, path: Path
) -> tuple[web.AppRunner, int]:
    """Call `start` with a port and keep the port that it returns in the file `path`. Return what `start` returns.

    Port 0 means the port in the file if it is still free, or else any free port. A damaged file counts as missing.
    """
    last = 0
    if port == 0:
        with contextlib.suppress(FileNotFoundError, ValueError):
            last = int(path.read_text())
        last = last if 0 < last < 65_536 else 0
    try:
        runner, bound = await start(last or port)
    except OSError as error:
        if not last or error.errno != errno.EADDRINUSE:
            raise
        LOG.warning("port %d, used before the restart, is taken now: listening on another port", last)
        runner, bound = await start(0)
    write_file(path, str(bound).encode())
    return runner, bound


def _response(answer: Answer) -> web.StreamResponse:
    if isinstance(answer, web.StreamResponse):
        return answer
    if isinstance(answer, bytes):
        return web.Response(body=answer)
    return web.json_response(text=answer.model_dump_json())


def _size_bytes(response: web.StreamResponse) -> int:
    """Return the size of a response's body; 0 if it is not in memory."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes | bytearray) else 0


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Sign an answer with the innermost application's key.

    Leave it unsigned if it depends on more than the request's signature covers, because somebody may have changed that on
    the way, or if its body is not known yet.
    """
    if "signature" not in request.headers or not request.get(COVERED):
        return
    if isinstance(response, web.FileResponse):  # task data, whose name is its digest
        digest = bytes.fromhex(request.match_info["sha256"])
    elif isinstance(response, web.Response) and isinstance(response.body, bytes | bytearray | None):
        body = response.body or b""
        if len(body) <= THREAD_BYTES:
            digest = sha256(body).digest()
        else:  # other requests must not wait for the hash
            digest = await asyncio.to_thread(lambda: sha256(body).digest())
    else:
        return
    identity = next(app[IDENTITY] for app in reversed(request.match_info.apps) if IDENTITY in app)
    headers = sign_answer(
        identity,
        request.method,
        request.raw_path,
        request.headers,
        status=response.status,
        body_sha256=digest,
        created_s=int(time.time()),
    )
    response.headers.update(headers)
