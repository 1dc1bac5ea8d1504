"""The page's own routes, under /chat: files, accounts, conversations, replies, verification.

Invariant: a request that changes data must come from this page. It needs a JSON body, a session, and the session's CSRF
token in a header. (Registration and login need no session.) Users see only their own data.
Left out: email, teams, uploaded files.
"""

import asyncio
import hmac
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import first_problem
from shoal.serve import proof
from shoal.serve.chat.accounts import SESSION_S, Accounts, NewSession, Session
from shoal.serve.chat.conversations import MESSAGE_CHARACTERS, ConversationReader, Conversations
from shoal.serve.chat.replies import Replies, ReplyForm
from shoal.serve.errors import BusyError
from shoal.serve.threads import FairSemaphore, FairThreadPool, read_body
from shoal.serve.versions import Versions
from shoal.shardcast.connections import keep_open, network
from shoal.watch.page.files import SHARED, Files
from shoal.watch.page.guard import HttpError, RateLimit, check_same_origin, json_body

SMALL_BYTES, LARGE_BYTES = 4096, 4 * MESSAGE_CHARACTERS + 4096
Kind = TypeVar("Kind", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LoginForm(Strict):
    name: Annotated[str, Field(max_length=200)]
    password: Annotated[str, Field(max_length=2000)]


class ConversationForm(Strict):
    leaf: Annotated[str, Field(max_length=40)]


async def read_form(request: web.Request, kind: type[Kind]) -> Kind:
    """Read and validate a small JSON body. Raise HttpError."""
    return parse_form(await json_body(request, SMALL_BYTES), kind)


def parse_form(data: bytes, kind: type[Kind]) -> Kind:
    """Validate a JSON body, naming the first invalid field. Raise HttpError."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise HttpError(400, first_problem(error)) from error


STATIC = Path(__file__).parent / "static"
SESSION, DEVICE = "shoal_session", "shoal_device"
DEVICE_S = 180 * 86_400
VERIFY_S, VERIFY_RETRY_S = 120.0, 30
SESSION_KEY = web.RequestKey("session", Session)
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Chat:
    def __init__(
        self,
        accounts: Accounts,
        conversations: Conversations,
        reader: ConversationReader,
        replies: Replies,
        versions: Versions,
        bodies: FairSemaphore,
        *,
        is_open: bool,
        registration: bool,
        secure_cookies: bool,
    ) -> None:
        self.accounts, self.conversations, self.reader = accounts, conversations, reader
        self.replies, self.versions, self.bodies = replies, versions, bodies
        self.is_open, self.registration, self.secure_cookies = is_open, registration and not is_open, secure_cookies
        self._access = {"open": is_open, "registration": self.registration}
        self.files = Files([SHARED, STATIC])
        self.verifying = FairThreadPool("verify", 1)  # a verification costs a forward pass
        self._verifications = RateLimit(30, 60)

    def attach(self, application: web.Application) -> None:
        get, post = application.router.add_get, application.router.add_post
        get("/", self.page)
        get("/static/{name}", self.static)
        get("/chat/me", self._guarded(self.me, session=False))
        post("/chat/register", self._guarded(self.register, session=False))
        post("/chat/login", self._guarded(self.login, session=False))
        post("/chat/logout", self._guarded(self.logout))
        get("/chat/models", self._guarded(self.models))
        get("/chat/conversations", self._guarded(self.summaries))
        post("/chat/conversations", self._guarded(self.create))
        get("/chat/conversations/{id}", self._guarded(self.read))
        post("/chat/conversations/{id}", self._guarded(self.select_leaf))
        application.router.add_delete("/chat/conversations/{id}", self._guarded(self.delete))
        post("/chat/conversations/{id}/replies", self._guarded(self.reply))
        get("/chat/conversations/{id}/messages/{message}/proof", self._guarded(self.proof))
        post("/chat/conversations/{id}/messages/{message}/verify", self._guarded(self.verify))

    def _guarded(self, route: Route, *, session: bool = True) -> Route:
        """Check each request before the route handles it. Turn an HttpError into the response {"error": ...}."""

        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                if request.method != "GET":
                    check_same_origin(request)
                if session:
                    own = self.accounts.session(request.cookies.get(SESSION, ""))
                    if own is None:
                        raise HttpError(401, "log in first")
                    if request.method != "GET" and not _has_csrf_token(request, own):
                        raise HttpError(403, "this page is out of date; reload it")
                    request[SESSION_KEY] = own
                    keep_open(request)
                return await route(request)
            except HttpError as error:
                return _error_response(error)

        return respond

    # --- the page ----------------------------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.Response:
        return self.files.respond(request, "index.html")

    async def static(self, request: web.Request) -> web.Response:
        return self.files.respond(request, request.match_info["name"])

    async def me(self, request: web.Request) -> web.Response:
        """Return who is logged in, if anyone; with `--open`, log the caller in."""
        own = self.accounts.session(request.cookies.get(SESSION, ""))
        if own is None and self.is_open:
            check_same_origin(request)
            return self._session_response(self.accounts.local())
        user = {"name": own.name, "csrf": own.csrf} if own else {"name": None, "first": self.accounts.is_empty()}
        return web.json_response(user | self._access)

    # --- accounts ----------------------------------------------------------------------------------------------------

    async def register(self, request: web.Request) -> web.Response:
        form = await read_form(request, LoginForm)
        keep_open(request)  # hashing may wait
        if not self.registration:
            raise HttpError(403, "registration is closed")
        return self._session_response(await self.accounts.register(form.name, form.password, self._address(request)))

    async def login(self, request: web.Request) -> web.Response:
        form = await read_form(request, LoginForm)
        keep_open(request)
        if self.is_open:
            raise HttpError(403, "this server needs no login")
        old, device = request.cookies.get(SESSION, ""), request.cookies.get(DEVICE, "")
        return self._session_response(
            await self.accounts.log_in(form.name, form.password, self._address(request), device, old)
        )

    async def logout(self, request: web.Request) -> web.Response:
        self.accounts.log_out(request.cookies.get(SESSION, ""))
        response = web.json_response({})
        response.del_cookie(SESSION, path="/", httponly=True, samesite="Strict", secure=self.secure_cookies)
        return response

    def _address(self, request: web.Request) -> str:
        """Return the address to rate-limit. Behind a proxy, it is the last address in X-Forwarded-For."""
        forwarded = request.headers.get("X-Forwarded-For", "") if self.secure_cookies else ""
        return network(forwarded.rpartition(",")[2].strip() or request.remote or "")

    def _session_response(self, opened: NewSession) -> web.Response:
        body = {"name": opened.session.name, "csrf": opened.session.csrf}
        response = web.json_response(body | self._access)
        for name, value, age_s in ((SESSION, opened.token, int(SESSION_S)), (DEVICE, opened.device, DEVICE_S)):
            response.set_cookie(
                name, value, max_age=age_s, path="/", httponly=True, samesite="Strict", secure=self.secure_cookies
            )
        return response

    # --- conversations -----------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        source = self.versions.source
        section = source.config.tasks if source.config else None
        sampling = source.config.sampling if source.config else None
        return web.json_response(
            {
                "name": source.name,
                "newest": self.versions.newest.id if self.versions.newest else None,
                "versions": [
                    {"id": offer.id, "version": offer.version, "loaded": self.versions.is_loaded(offer.id)}
                    for offer in self.versions.offers()[:200]
                ],
                "targets": sorted(set(section.length_targets)) if section else [],
                "as_trained": section is not None,
                "temperature": sampling.temperature if sampling else 1.0,
                "max_tokens": sampling.max_tokens if sampling else None,
            }
        )

    async def summaries(self, request: web.Request) -> web.Response:
        return web.json_response(self.conversations.summaries(request[SESSION_KEY].user))

    async def create(self, request: web.Request) -> web.Response:
        await read_form(request, Strict)
        return web.json_response({"id": self.conversations.create(request[SESSION_KEY].user)})

    async def read(self, request: web.Request) -> web.Response:
        """Return the whole message tree; the page's export uses this route too."""
        user, id = request[SESSION_KEY].user, request.match_info["id"]
        text = await self.reader.run(user, lambda stored: json.dumps(stored.read(user, id), ensure_ascii=False))
        return web.Response(text=text, content_type="application/json")

    async def select_leaf(self, request: web.Request) -> web.Response:
        form = await read_form(request, ConversationForm)
        self.conversations.select_leaf(request[SESSION_KEY].user, request.match_info["id"], form.leaf)
        return web.json_response({})

    async def delete(self, request: web.Request) -> web.Response:
        self.conversations.delete(request[SESSION_KEY].user, request.match_info["id"])
        return web.json_response({})

    # --- replies -----------------------------------------------------------------------------------------------------

    async def reply(self, request: web.Request) -> web.StreamResponse:
        """Stream server-sent events until all replies are done. Closing the connection stops and saves them."""
        async with read_body(self.bodies, request, _caller(request), LARGE_BYTES) as data:
            form = parse_form(data, ReplyForm)
        user, id, parent = request[SESSION_KEY].user, request.match_info["id"], form.parent
        if form.content is not None:
            if parent is not None:
                self.conversations.check(user, id, parent)
            parent = self.conversations.add(user, id, parent, "user", form.content, {"target": form.target})
        if parent is None:
            raise HttpError(400, "there is no message to reply to")
        events = self.replies.write(user, id, parent, form)
        try:
            first = await anext(events)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
            await response.prepare(request)
            await _send(response, {"event": "question", "message": parent})
            await _send(response, first)
            async for event in events:
                await _send(response, event)
            await response.write_eof()
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        return response

    async def proof(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._proof(request), content_type="application/json")

    async def _proof(self, request: web.Request) -> str:
        user, ids = request[SESSION_KEY].user, request.match_info
        return await self.reader.run(user, lambda stored: stored.proof(user, ids["id"], ids["message"]))

    async def verify(self, request: web.Request) -> web.Response:
        """Recompute a reply within VERIFY_S; stop if the client disconnects. Raise ReplyError or BusyError."""
        await read_form(request, Strict)
        self._verifications.take(str(request[SESSION_KEY].user), "verifications")
        data = (await self._proof(request)).encode()
        caller, client_left = _caller(request), threading.Event()
        try:
            async with asyncio.timeout(VERIFY_S):
                reply = await self.verifying.run(caller, lambda: proof.Reply.read(data))
                async with self.versions.borrow(reply.model, caller, page=True) as loaded:
                    config = self.versions.source.config
                    verdict = await self.verifying.run(
                        caller, lambda: proof.verify(reply, loaded, config, client_left.is_set), loaded
                    )
        except TimeoutError:
            raise BusyError(f"the verification did not finish within {VERIFY_S:g} s", VERIFY_RETRY_S) from None
        finally:
            client_left.set()
        findings = [vars(finding) for finding in verdict.findings]
        return web.json_response(
            {"passed": verdict.passed, "exact": verdict.exact, "sentence": verdict.sentence, "findings": findings}
        )


def _caller(request: web.Request) -> str:
    return f"user {request[SESSION_KEY].user}"


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


def _has_csrf_token(request: web.Request, session: Session) -> bool:
    token = request.headers.get("X-CSRF-Token", "").encode(errors="surrogateescape")
    return hmac.compare_digest(token, session.csrf.encode())


def _error_response(error: HttpError) -> web.Response:
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
    return web.json_response({"error": str(error)}, status=error.status, headers=headers)
