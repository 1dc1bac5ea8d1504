"""GET /v1/models, POST /v1/chat/completions, POST /v1/completions.

    read and validate -> borrow the version -> tokenize in a thread -> submit n completions
    -> one JSON body at the end, or server-sent events

Invariant: when a client disconnects, its rows in the batch are freed. Errors have OpenAI's shape; a 429 or 503 has
Retry-After. API keys are compared by their digests in constant time, and are never logged.
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
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.openai.requests import ChatRequest, CommonParams, CompletionRequest, Kind, parse_request
from shoal.serve.openai.responses import ApiResponse
from shoal.serve.prompt import as_trained, check_length, check_tokens, encode
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import SMALL_BYTES, FairSemaphore, FairThreadPool, read_body
from shoal.serve.versions import LoadedModel, Versions
from shoal.shardcast.connections import keep_open, network
from shoal.watch.page.guard import HttpError

MIN_KEY_CHARACTERS = 16


class Keys:
    """The API's bearer keys. A key file holds one `NAME KEY` per line."""

    def __init__(self, keys: dict[str, str] | None) -> None:
        """`keys` maps keys to names; None admits everyone."""
        self._names = None if keys is None else {_digest(key): name for key, name in keys.items()}

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a key file. Raise UserError."""
        names: dict[str, str] = {}
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; the file needs one `NAME KEY` per line") from error
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            words = line.split()
            if len(words) != 2 or len(words[1]) < MIN_KEY_CHARACTERS:
                raise UserError(
                    f"{path}, line {number}: write `NAME KEY`, with a key of {MIN_KEY_CHARACTERS} characters or more"
                )
            names[words[1]] = words[0]
        return cls(names)

    @classmethod
    def read_or_make(cls, path: Path) -> "Keys":
        """Read a key file; if it is missing, create it with a random key."""
        if not path.exists():
            write_new_file(path, f"local sk-{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
        return cls.read(path)

    def caller(self, request: web.Request) -> str | None:
        """Return the caller's name; None if the key is missing or wrong."""
        if self._names is None:
            return f"address {network(request.remote or '')}"
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        received, caller = _digest(key.strip()), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, received):
                caller = f"key {name}"
        return caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


BODY_BYTES = 4 << 20
DEFAULT_TOKENS = 1024  # the limit of a chat request that sets none; it is lower if the context has less room
MAX_LOGPROBS = 1 << 17  # the logprobs of one response may wait in memory for their reader; this many take tens of MiB
SEEDS = 1 << 63  # negative seeds wrap around
CALLER = web.RequestKey("caller", str)
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`. Choice 0 has the request's seed, others a hash of that seed and the index."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"shoal/serve\n{seed}\n{index}".encode()).digest()[:8], "big") >> 1


def new_seed() -> int:
    return secrets.randbits(48)


def resolve_max_tokens(loaded: LoadedModel, prompt: Sequence[int], requested: int | None) -> int:
    """Return `max_tokens` for this prompt. Raise RequestError if prompt and reply exceed the context."""
    room, needed = loaded.positions - len(prompt), 1 if requested is None else requested
    if room < needed:
        raise RequestError(
            f"This model's maximum context length is {loaded.positions} tokens; the prompt has {len(prompt)} and "
            f"max_tokens is {needed}.",
            param="max_tokens" if room >= 1 else "messages",
            code="context_length_exceeded",
        )
    return min(room, DEFAULT_TOKENS) if requested is None else requested


@dataclass
class OpenAI:
    versions: Versions
    scheduler: ServeScheduler
    keys: Keys
    config: Config | None  # the served run's config
    threads: FairThreadPool
    bodies: FairSemaphore

    def attach(self, application: web.Application) -> None:
        application.router.add_get("/v1/models", self._guarded(self.models))
        application.router.add_get("/v1/models/{id}", self._guarded(self.model))
        application.router.add_post("/v1/chat/completions", self._guarded(self.chat))
        application.router.add_post("/v1/completions", self._guarded(self.complete))

    def _guarded(self, route: Route) -> Route:
        """Check the key before the route handles a request. Return errors in OpenAI's shape."""

        async def respond(request: web.Request) -> web.StreamResponse:
            caller = self.keys.caller(request)
            if caller is None:
                message, kind = "Incorrect API key provided.", "authentication_error"
                return error_response(RequestError(message, status=401, kind=kind, code="invalid_api_key"))
            request[CALLER] = caller
            keep_open(request)
            try:
                return await route(request)
            except RequestError as error:
                return error_response(error)
            except HttpError as error:
                return error_response(RequestError(str(error), status=error.status))

        return respond

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._models()})

    async def model(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        model = next((model for model in self._models() if model["id"] == id), None)
        if model is None:
            raise UnknownVersionError(f"The model {id[:100]!r} does not exist")
        return web.json_response(model)

    def _models(self) -> list[dict[str, Any]]:
        newest = self.versions.newest
        names = [self.versions.source.name] if newest else []
        ids = dict.fromkeys([*names, *(offer.id for offer in self.versions.offers())])
        return [{"id": id, "object": "model", "created": 0, "owned_by": "shoal"} for id in ids]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            async with read_body(self.bodies, request, request[CALLER], BODY_BYTES) as data:
                params = await self._read(request, ChatRequest, data)
                loaded = await stack.enter_async_context(self.versions.borrow(params.model, request[CALLER]))
                messages = self._messages(params)
                prompt = await self.threads.run(request[CALLER], lambda: encode(loaded, messages), loaded)
            generations = self._generations(
                request, loaded, params, [prompt], params.top, params.max_reply_tokens, proof=params.proof
            )
            response = ApiResponse(params, loaded, generations, chat=True, messages=messages)
            response.submit(self.scheduler)
        return await response.send(request, self.scheduler, self.threads)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            async with read_body(self.bodies, request, request[CALLER], BODY_BYTES) as data:
                params = await self._read(request, CompletionRequest, data)
                loaded = await stack.enter_async_context(self.versions.borrow(params.model, request[CALLER]))
                prompts = await self.threads.run(request[CALLER], lambda: _prompts(params, loaded), loaded)
            generations = self._generations(
                request, loaded, params, prompts, params.logprobs, params.max_tokens, echo=bool(params.echo)
            )
            response = ApiResponse(params, loaded, generations, chat=False)
            response.submit(self.scheduler)
        return await response.send(request, self.scheduler, self.threads)

    async def _read(self, request: web.Request, kind: type[Kind], data: bytes) -> Kind:
        if len(data) <= SMALL_BYTES:
            return parse_request(kind, data)
        return await self.threads.run(request[CALLER], lambda: parse_request(kind, data))

    def _messages(self, params: ChatRequest) -> list[Any]:
        messages: list[Any] = [message.as_template_message() for message in params.messages]
        if not params.as_trained and not params.target_length:
            return messages
        if self.config is None:
            raise RequestError(
                "as_trained and target_length need a run; this server serves a model without a run", param="as_trained"
            )
        if params.target_length and not self.config.tasks.length_targets:
            raise RequestError("this run was not trained with target lengths", param="target_length")
        return as_trained(self.config, messages, params.target_length or 0)

    def _generations(
        self,
        request: web.Request,
        loaded: LoadedModel,
        params: CommonParams,
        prompts: Sequence[tuple[int, ...]],
        top: int | None,
        max_tokens: int | None,
        *,
        echo: bool = False,
        proof: bool = False,
    ) -> list[Generation]:
        loop = asyncio.get_running_loop()
        n = params.n or 1
        self.scheduler.check_caller(request[CALLER], n * len(prompts))
        token_limits = [resolve_max_tokens(loaded, prompt, max_tokens) for prompt in prompts]
        if top is not None:
            length = sum(token_limits) + sum(map(len, prompts)) * echo
            if n * length * (1 + top) > MAX_LOGPROBS:
                raise RequestError(
                    f"{n * length * (1 + top)} logprobs exceed the limit of {MAX_LOGPROBS} per response; ask for fewer "
                    "completions, tokens or top logprobs",
                    param="logprobs",
                )
        generations = []
        for prompt, limit in zip(prompts, token_limits, strict=True):
            seed = new_seed() if params.seed is None else params.seed % SEEDS
            for index in range(n):
                serve_request = ServeRequest(
                    prompt=prompt,
                    seed=choice_seed(seed, index),
                    temperature=1.0 if params.temperature is None else params.temperature,
                    max_tokens=max(1, limit),
                    stops=params.stops,
                    top=top,
                    echo=echo and top is not None,
                    proof=proof,
                    caller=request[CALLER],
                    prompt_only=limit == 0,
                )
                generations.append(Generation(serve_request, loaded, loop))
        return generations


def _prompts(params: CompletionRequest, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Tokenize every prompt. Raise RequestError or PromptError."""
    prompt = params.prompt
    prompts: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    tokenized = []
    for prompt in prompts:
        check_length(loaded, len(prompt))
        tokens = tuple(loaded.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise RequestError("prompt: it is empty", param="prompt")
        check_tokens(loaded, tokens)
        tokenized.append(tokens)
    if not tokenized:
        raise RequestError("prompt: it is empty", param="prompt")
    return tokenized


@web.middleware
async def unknown_route(request: web.Request, handler: Route) -> web.StreamResponse:
    """Respond to unknown paths and methods with errors in OpenAI's shape."""
    target = f"{request.method[:20]} {request.path[:200]}"
    try:
        return await handler(request)
    except web.HTTPNotFound:
        message = f"Unknown request URL: {target}; the API has /v1/models, /v1/chat/completions, /v1/completions"
        return error_response(RequestError(message, status=404, code="unknown_url"))
    except web.HTTPMethodNotAllowed as error:
        allowed = error.headers["Allow"]
        message = f"{target} is not allowed; use {allowed}"
        response = error_response(RequestError(message, status=405, code="method_not_allowed"))
        response.headers["Allow"] = allowed
        return response


def error_response(error: RequestError) -> web.Response:
    """Return an error in OpenAI's shape."""
    body = {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
    return web.json_response(body, status=error.status, headers=headers)
