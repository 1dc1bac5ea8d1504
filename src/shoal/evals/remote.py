"""A model behind an OpenAI-compatible URL: `POST URL/chat/completions`, one request per completion.

Invariant: every request has a deadline over all its attempts, and an error names the URL, the cause and the next step. What
a server repeats from a seed is its own affair: a seed is sent, no result is promised.
Called by `evaluate`. Left out: streaming, reasoning fields (only `content` is graded), and servers without a chat route.
"""

import asyncio
import os
import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from shoal.evals.completions import Answer, Asked, EvalError, EvalUsageError, Key
from shoal.evals.evaluate import Contestant
from shoal.evals.samplers import Done, Sampling
from shoal.protocol.calling import PLAIN, BodyError, OversizeError, check_plain

KEY_VARIABLE = "SHOAL_API_KEY"
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
SEEDS = 2**31  # servers take signed 32-bit seeds
MOST_BYTES = 16 << 20  # of an answer
EXCERPT = 300  # characters of a server's answer in an error


@dataclass(frozen=True)
class Address:
    url: str  # up to and with /v1
    served_name: str
    key_variable: str = KEY_VARIABLE  # environment variable that holds the API key; unset: none is sent
    concurrency: int = 8  # requests under way at once
    deadline_s: float = 600.0  # for one completion, with all its attempts


class RetryableError(Exception):
    """A failed attempt that another one may fix."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s  # as the server asked


class RemoteSampler:
    def __init__(self, address: Address, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.address = address
        self.transport = transport
        self.route = f"{address.url.rstrip('/')}/chat/completions"

    def answer(self, asked: Sequence[Asked], sampling: Sampling, known: Container[Key], done: Done) -> None:
        """Raises EvalError for the first request that fails for good; what came until then was handed to `done`."""
        waiting = [one for one in asked if one.key not in known]
        try:
            asyncio.run(self._all(waiting, sampling, done))
        except ExceptionGroup as group:
            raise _first(group) from None

    async def _all(self, waiting: Sequence[Asked], sampling: Sampling, done: Done) -> None:
        key = os.environ.get(self.address.key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        slots = asyncio.Semaphore(self.address.concurrency)
        limits = httpx.Limits(max_connections=self.address.concurrency)
        async with httpx.AsyncClient(headers=headers, limits=limits, transport=self.transport) as client:

            async def one(asked: Asked) -> None:
                async with slots:
                    done([(asked, await self._one(client, asked, sampling))])

            async with asyncio.TaskGroup() as group:
                for asked in waiting:
                    group.create_task(one(asked))

    async def _one(self, client: httpx.AsyncClient, asked: Asked, sampling: Sampling) -> Answer:
        body = {
            "model": self.address.served_name,
            "messages": [{"role": "user", "content": asked.message}],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": asked.seed % SEEDS,
        }
        last = "no answer"
        try:
            async with asyncio.timeout(self.address.deadline_s):
                wait_s = FIRST_WAIT_S
                while True:
                    try:
                        return await self._attempt(client, body)
                    except RetryableError as error:
                        last = str(error)
                        spread = random.uniform(0.5, 1.0)  # so that waiting requests do not return together
                        await asyncio.sleep(error.wait_s if error.wait_s is not None else wait_s * spread)
                        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        except TimeoutError:
            raise EvalError(
                f"{self.route} gave no completion within {self.address.deadline_s:g} s ({last}): see the server's log, "
                "lower --concurrency or raise --deadline, and run the same command again: it continues where it was"
            ) from None

    async def _attempt(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        try:
            response = await self._post(client, body)
        except httpx.InvalidURL as error:
            raise EvalUsageError(f"{self.route} is not a URL ({error}); give --url http://HOST:PORT/v1") from error
        except httpx.UnsupportedProtocol as error:
            raise EvalUsageError(f"{self.route} is not an http or https URL; give --url http://HOST:PORT/v1") from error
        except BodyError as error:
            raise EvalError(f"the answer of {self.route} is not read: {error}") from error
        except httpx.TransportError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from error
        excerpt = " ".join(response.text[:EXCERPT].split())
        if response.status_code in RETRIED:
            raise RetryableError(f"status {response.status_code}: {excerpt}", _asked_wait_s(response))
        if response.status_code in (401, 403):
            raise EvalError(
                f"{self.route} refuses access (status {response.status_code}): put the API key into the environment "
                f"variable {self.address.key_variable}, or name another one with --key-variable"
            )
        if response.status_code == 404:
            raise EvalError(
                f"{self.route} is not there (status 404: {excerpt}): --url ends with /v1 on most servers, and "
                f"--served-name {self.address.served_name} must be one of those that GET {self.address.url}/models lists"
            )
        if response.status_code != 200:
            raise EvalError(f"{self.route} refused the request: status {response.status_code}: {excerpt}")
        return self._read(response, excerpt)

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """The answer, read whole: the caller's deadline ends one that trickles. Raises EvalError for one too large."""
        data = bytearray()
        async with client.stream(
            "POST", self.route, json=body, headers=PLAIN, timeout=self.address.deadline_s
        ) as response:
            check_plain(response)
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    raise OversizeError(f"it answers with more than {MOST_BYTES} bytes")
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(data))

    def _read(self, response: httpx.Response, excerpt: str) -> Answer:
        try:
            found = response.json()
            choice = found["choices"][0]
            text, why = choice["message"].get("content"), choice.get("finish_reason")
            tokens = (found.get("usage") or {}).get("completion_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise EvalError(f"{self.route} does not answer as the OpenAI API does: {excerpt}") from error
        if not isinstance(text, str | None) or not isinstance(tokens, int | None):
            raise EvalError(f"{self.route} does not answer as the OpenAI API does: {excerpt}")
        return Answer(text or "", tokens, why != "length")  # a reasoning model cut off early has no content


def _asked_wait_s(response: httpx.Response) -> float | None:
    try:
        return min(max(0.0, float(response.headers["retry-after"])), LONGEST_WAIT_S)  # 0 for "nan"
    except (KeyError, ValueError):  # absent, or a date
        return None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def served(address: Address) -> Contestant:
    """The model behind an address. What weights a server holds under a name is not known here."""
    return Contestant(address.served_name, {"url": address.url}, lambda: RemoteSampler(address))
