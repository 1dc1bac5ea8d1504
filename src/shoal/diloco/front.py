"""What happens to every request of a meeting before and after its route: signatures are checked, answers signed.

Invariant: a request's head is checked before its body is read. Every answer to a signed request, refusals included, is
signed for that request: a site believes no other. What is left of a refused body is read at a bounded rate and not kept
(`gate`), so a site that sends all of it before it reads anything gets the reason.
Called by `serve`. `shoal.coordinator.http.front` does the same for a pool.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from hashlib import sha256

from aiohttp import web
from pydantic import ValidationError

from shoal.diloco.gate import BusyError, Gate, read_body
from shoal.diloco.messages import MeetingError
from shoal.protocol.answers import sign_answer
from shoal.protocol.identity import Identity
from shoal.protocol.signing import MAX_AGE_S, SignatureError, verify_head

SMALL_BYTES = 64 << 10
LARGE_BYTES = 1 << 20  # is hashed beside the event loop
MOST_NONCES = 10_000  # of one site: more than `gate.SITE_RATE` lets it need
SLOT = web.RequestKey("slot", ExitStack)  # held until the answer is sent

Handler = Callable[[web.Request, str, bytes], Awaitable[web.Response]]
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Nonces:
    """Which requests were served, in memory: a restart forgets, and the clock bounds what can be served again."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}  # by key

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        """Raises BusyError for a key that asked more often than its rate allows, which would fill the memory."""
        now_s, seen = time.time(), self._seen.setdefault(key, {})
        if nonce in seen:
            return False
        if len(seen) >= MOST_NONCES:
            seen = self._seen[key] = {each: end_s for each, end_s in seen.items() if end_s > now_s}
            if len(seen) >= MOST_NONCES:
                raise BusyError(f"more than {MOST_NONCES} requests in {2 * MAX_AGE_S} s; wait")
        seen[nonce] = created_s + 2 * MAX_AGE_S
        return True


class Front:
    def __init__(self, run: str, identity: Identity, names: Mapping[str, str]) -> None:
        """`names`: the sites by key, as they are at each request."""
        self.run, self.identity, self.names = run, identity, names
        self.nonces, self.gate = Nonces(), Gate()

    @web.middleware
    async def around(self, request: web.Request, handler: Route) -> web.StreamResponse:
        with ExitStack() as slot:
            request[SLOT] = slot
            return await self._answered(request, handler)

    async def _answered(self, request: web.Request, handler: Route) -> web.Response:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error.status, error.reason)
        except MeetingError as error:
            response = _refusal(error.status, str(error))
        assert isinstance(response, web.Response) and isinstance(response.body, bytes | None)
        await self.gate.leave(request, response)
        signed = sign_answer(
            self.identity,
            request.headers,
            status=response.status,
            body_sha256=await _hash(response.body or b""),
            created_s=int(time.time()),
        )
        response.headers.update(signed)
        with suppress(ConnectionError):  # whoever asked is gone
            await response.prepare(request)
            await response.write_eof()
        if response.status >= 400:
            await self.gate.discard(request)
        return response

    def checked(
        self,
        handler: Handler,
        most: int = SMALL_BYTES,
        *,
        stranger: bool = False,
        rare: bool = False,
        large: bool = False,
    ) -> Route:
        """A route for requests that a site signed, or a `stranger` who may become one, with bodies of at most `most` bytes.

        The handler is given the site's name (a stranger's key) and the body. `rare`, `large`: see `Gate.site`.
        """

        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                head = verify_head(
                    request.method, request.raw_path, request.headers, audience=self.run, now_s=time.time()
                )
                if name := self.names.get(head.key, ""):
                    head.spend(self.nonces)  # of sites alone: strangers could fill the memory
            except SignatureError as error:
                return _refusal(401, str(error))
            if not (name or stranger):
                return _refusal(403, "this key has not joined the meeting: join with an invite")
            if request.content_length is None and request.method != "GET":
                return _refusal(411, "a body needs a content-length")
            if (request.content_length or 0) > most:
                return _refusal(413, f"the body has {request.content_length} bytes, at most {most} are taken")
            if name:
                request[SLOT].enter_context(self.gate.site(request, name, rare=rare, large=large))
            body = await read_body(request, most)
            try:
                head.check_body(await _hash(body), len(body))
                return await handler(request, name or head.key, body)
            except SignatureError as error:
                return _refusal(401, str(error))
            except ValidationError as error:
                return _refusal(422, f"malformed: {error.errors()[0]['msg']}")

        return respond


async def _hash(body: bytes | bytearray) -> bytes:
    if len(body) <= LARGE_BYTES:
        return sha256(body).digest()
    return await asyncio.to_thread(lambda: sha256(body).digest())


def _refusal(status: int, message: str) -> web.Response:
    return web.Response(body=json.dumps({"error": message}).encode(), status=status, content_type="application/json")
