"""GET /v1/models, POST /v1/chat/completions, POST /v1/completions.

    read and check -> take the version -> tokenize in a thread -> submit n completions
    -> JSON at the end, or server-sent events as they come

Invariant: a client that leaves early frees its rows; refusals have OpenAI's shape; a 429 or 503 says when to try again.
API keys are compared by their digests in constant time, and never written to a log.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.config import Config
from shoal.errors import UserError
from shoal.files import write_new_file
from shoal.serve.errors import RequestError, UnknownVersionError
from shoal.serve.generation import Generation, Grammar, ServeAsk, compiled
from shoal.serve.openai.answers import Answer
from shoal.serve.openai.requests import ChatRequest, Common, CompletionRequest, Kind, read
from shoal.serve.openai.tools import forced, form_of, offered
from shoal.serve.prompt import as_trained, check_length, encode
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import SMALL_BYTES, Places, Threads, received
from shoal.serve.versions import LoadedModel, Versions
from shoal.shardcast.connections import network
from shoal.watch.page.guard import HttpError

LEAST = 16  # characters of a key


class Keys:
    """The API's bearer keys: whose request is this? A key file holds one `NAME KEY` a line."""

    def __init__(self, keys: dict[str, str] | None) -> None:
        """`keys`: names by key; None lets everyone ask."""
        self._names = None if keys is None else {_digest(key): name for key, name in keys.items()}

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Raises UserError."""
        found: dict[str, str] = {}
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; it should hold one `NAME KEY` a line") from error
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            words = line.split()
            if len(words) != 2 or len(words[1]) < LEAST:
                raise UserError(f"{path}, line {number}: write `NAME KEY`, a key of {LEAST} characters or more")
            found[words[1]] = words[0]
        return cls(found)

    @classmethod
    def read_or_make(cls, path: Path) -> "Keys":
        """The keys in this file; a new file with one random key if there is none."""
        if not path.exists():
            write_new_file(path, f"local sk-{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
        return cls.read(path)

    def caller(self, request: web.Request) -> str | None:
        """Whose request this is; None: nobody's who may ask."""
        if self._names is None:
            return f"address {network(request.remote or '')}"
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        given, caller = _digest(key.strip()), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                caller = f"key {name}"
        return caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


BODY_BYTES = 4 << 20
DEFAULT_TOKENS = 1024  # of a chat reply that states no limit; fewer where the model has no room
MOST_LOGPROBS = 1 << 17  # in one answer that is not streamed: tens of MiB
SEEDS = 1 << 63  # negative ones count from the end
CALLER = web.RequestKey("caller", str)
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def seed_of(seed: int, index: int) -> int:
    """The seed of choice `index` where the request gave one: its own, then hashes of it."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"shoal/serve\n{seed}\n{index}".encode()).digest()[:8], "big") >> 1


def new_seed() -> int:
    return secrets.randbits(48)


def tokens_left(held: LoadedModel, prompt: Sequence[int], wanted: int | None) -> int:
    """`max_tokens` for this prompt. Raises RequestError if prompt and reply exceed the model's positions."""
    room, least = held.positions - len(prompt), 1 if wanted is None else wanted
    if room < least:
        raise RequestError(
            f"This model's maximum context length is {held.positions} tokens; the prompt has {len(prompt)} and "
            f"max_tokens is {least}.",
            param="max_tokens" if room >= 1 else "messages",
            code="context_length_exceeded",
        )
    return min(room, DEFAULT_TOKENS) if wanted is None else wanted


@dataclass
class OpenAI:
    versions: Versions
    scheduler: ServeScheduler
    keys: Keys
    config: Config | None  # of the run that is served
    threads: Threads
    bodies: Places

    def attach(self, application: web.Application) -> None:
        application.router.add_get("/v1/models", self._guarded(self.models))
        application.router.add_get("/v1/models/{id}", self._guarded(self.model))
        application.router.add_post("/v1/chat/completions", self._guarded(self.chat))
        application.router.add_post("/v1/completions", self._guarded(self.complete))

    def _guarded(self, route: Route) -> Route:
        """The route with OpenAI's errors, for callers with a key."""

        async def respond(request: web.Request) -> web.StreamResponse:
            caller = self.keys.caller(request)
            if caller is None:
                words, kind = "Incorrect API key provided.", "authentication_error"
                return refusal(RequestError(words, status=401, kind=kind, code="invalid_api_key"))
            request[CALLER] = caller
            try:
                return await route(request)
            except RequestError as error:
                return refusal(error)
            except HttpError as error:
                return refusal(RequestError(str(error), status=error.status))

        return respond

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._listed()})

    async def model(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        found = next((one for one in self._listed() if one["id"] == wanted), None)
        if found is None:
            raise UnknownVersionError(f"The model {wanted[:100]!r} does not exist")
        return web.json_response(found)

    def _listed(self) -> list[dict[str, Any]]:
        newest = self.versions.newest
        names = [self.versions.source.name] if newest else []
        ids = dict.fromkeys([*names, *(offer.id for offer in self.versions.offers())])
        return [{"id": id, "object": "model", "created": 0, "owned_by": "shoal"} for id in ids]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            async with received(self.bodies, request, request[CALLER], BODY_BYTES) as data:
                asked = await self._read(request, ChatRequest, data)
                held = await stack.enter_async_context(self.versions.take(asked.model))
                tools, messages = offered(asked), self._messages(asked)
                schema = forced(asked) or asked.schema_of_reply
                form, prompt, grammars = await self.threads.run(
                    request[CALLER],
                    lambda: (
                        form_of(held.tokenizer, is_forced=schema is not None) if tools else None,
                        encode(held, messages, tools),
                        compiled(schema, held, asked.n or 1) if schema is not None else [],
                    ),
                    held,
                )
            shown = form.shown if form else frozenset()
            generations = self._generations(
                request, held, asked, [prompt], asked.top, asked.most, proof=asked.proof, shown=shown, grammars=grammars
            )
            answer = Answer(asked, held, generations, chat=True, messages=messages, tools=tools, form=form)
            return await answer.respond(request, self.scheduler, self.threads)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            async with received(self.bodies, request, request[CALLER], BODY_BYTES) as data:
                asked = await self._read(request, CompletionRequest, data)
                held = await stack.enter_async_context(self.versions.take(asked.model))
                prompts = await self.threads.run(request[CALLER], lambda: _prompts(asked, held), held)
            generations = self._generations(
                request, held, asked, prompts, asked.logprobs, asked.max_tokens, echo=bool(asked.echo)
            )
            answer = Answer(asked, held, generations, chat=False)
            return await answer.respond(request, self.scheduler, self.threads)

    async def _read(self, request: web.Request, kind: type[Kind], data: bytes) -> Kind:
        if len(data) <= SMALL_BYTES:
            return read(kind, data)
        return await self.threads.run(request[CALLER], lambda: read(kind, data))

    def _messages(self, asked: ChatRequest) -> list[Any]:
        messages: list[Any] = [message.said() for message in asked.messages]
        if not asked.as_trained and not asked.target_length:
            return messages
        if self.config is None:
            raise RequestError("as_trained and target_length need a run; this server holds a model", param="as_trained")
        if asked.target_length and not self.config.tasks.length_targets:
            raise RequestError("this run was not trained with target lengths", param="target_length")
        return as_trained(self.config, messages, asked.target_length or 0)

    def _generations(
        self,
        request: web.Request,
        held: LoadedModel,
        asked: Common,
        prompts: Sequence[tuple[int, ...]],
        top: int | None,
        most: int | None,
        *,
        echo: bool = False,
        proof: bool = False,
        shown: frozenset[int] = frozenset(),
        grammars: Sequence[Grammar] = (),
    ) -> list[Generation]:
        loop = asyncio.get_running_loop()
        n = asked.n or 1
        self.scheduler.check_caller(request[CALLER], n * len(prompts))
        most_tokens = [tokens_left(held, prompt, most) for prompt in prompts]
        if top is not None:
            length = sum(0 if asked.stream else one for one in most_tokens) + sum(map(len, prompts)) * echo
            if n * length * (1 + top) > MOST_LOGPROBS:
                raise RequestError(
                    f"{n * length * (1 + top)} logprobs exceed the {MOST_LOGPROBS} of one answer; ask for fewer "
                    "completions, tokens or top logprobs, or for a stream",
                    param="logprobs",
                )
        found = []
        for prompt, limit in zip(prompts, most_tokens, strict=True):
            seed = new_seed() if asked.seed is None else asked.seed % SEEDS
            for index in range(n):
                ask = ServeAsk(
                    prompt=prompt,
                    seed=seed_of(seed, index),
                    temperature=1.0 if asked.temperature is None else asked.temperature,
                    max_tokens=max(1, limit),
                    stops=asked.stops,
                    top=top,
                    echo=echo and top is not None,
                    proof=proof,
                    caller=request[CALLER],
                    scored=limit == 0,
                    shown=shown,
                )
                found.append(Generation(ask, held, loop, grammars[index] if grammars else None))
        return found


def _prompts(asked: CompletionRequest, held: LoadedModel) -> list[tuple[int, ...]]:
    """Every prompt as tokens. Raises RequestError, PromptError."""
    given = asked.prompt
    many: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    vocabulary = held.engine.model.config.vocab_size
    found = []
    for one in many:
        check_length(held, len(one))
        tokens = tuple(held.tokenizer(one)["input_ids"]) if isinstance(one, str) else tuple(one)
        if not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise RequestError("prompt: empty, or a token id outside of the vocabulary", param="prompt")
        found.append(tokens)
    if not found:
        raise RequestError("prompt: empty", param="prompt")
    return found


@web.middleware
async def unknown(request: web.Request, handler: Route) -> web.StreamResponse:
    """Paths and methods that there are not, in OpenAI's shape."""
    asked = f"{request.method[:20]} {request.path[:200]}"
    try:
        return await handler(request)
    except web.HTTPNotFound:
        words = f"Unknown request URL: {asked}; there are /v1/models, /v1/chat/completions, /v1/completions"
        return refusal(RequestError(words, status=404, code="unknown_url"))
    except web.HTTPMethodNotAllowed as error:
        allowed = error.headers["Allow"]
        words = f"{asked} is not allowed; use {allowed}"
        answer = refusal(RequestError(words, status=405, code="method_not_allowed"))
        answer.headers["Allow"] = allowed
        return answer


def refusal(error: RequestError) -> web.Response:
    """In OpenAI's shape."""
    body = {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
    return web.json_response(body, status=error.status, headers=headers)
