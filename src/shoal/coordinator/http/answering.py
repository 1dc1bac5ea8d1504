"""Every signed route's frame: who asks is admitted, a bounded body is read, and answers and errors become HTTP.

Invariant: a handler gets a request only once its signature, role, rate and body were checked. Errors that a message explains
become their status; any other is a bug, and a 500 of its own route only.
Called by `routes` and `files`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.coordinator.http.admission import Admission, read_body
from shoal.coordinator.http.front import refusal, size_bytes
from shoal.coordinator.http.pace import Pace
from shoal.coordinator.state.database import PoolError
from shoal.coordinator.tables.connection import DatabaseFullError, DatabaseLostError
from shoal.protocol.invite import InviteError
from shoal.protocol.messages import Ok, Role
from shoal.protocol.signing import SignatureError
from shoal.store.folder import StoreError

MAX_SMALL_BYTES = 4 << 10  # a registration, a claim, a version, an evaluation: a few fields

TOO_EARLY = 425  # RFC 8470: of a request that may be a replay

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Request:
    """A verified request: who signed it, with what body, for which path parameters."""

    key: str
    body: bytes
    match: dict[str, str]


Answer = BaseModel | bytes | web.StreamResponse
Handler = Callable[[Request], Awaitable[Answer]]
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Answering:
    admission: Admission
    pace: Pace

    def signed(self, handler: Handler, roles: Sequence[Role], limit_bytes: int = MAX_SMALL_BYTES) -> Route:
        """A route that answers `roles` and takes a small body."""

        async def respond(request: web.Request) -> Answer:
            head = self.admission.admit(request, roles, limit_bytes)
            with self.pace.under_way(head.key):
                body = await read_body(request.content.readany, head, limit_bytes)
                found = await handler(Request(head.key, body, dict(request.match_info)))
                if isinstance(found, bytes | web.FileResponse):
                    return found  # rollouts, which only trusted roles read; task data, which its handler counts
                response = _response(found)
                self.pace.answered(head.key, size_bytes(response))
                return response

        return answering(respond)


def answering(respond: Callable[[web.Request], Awaitable[Answer]]) -> Route:
    """Turn an answer into a response, and an error that a message explains into its status."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            found = await respond(request)
        except (web.RequestPayloadError, ConnectionResetError) as error:  # broken encoding; a client that left
            return refusal(400, str(error))
        except SignatureError as error:
            return refusal(TOO_EARLY if error.reason == "replayed" else 401, str(error))
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
        return _response(found)

    return answer


def _response(found: Answer) -> web.StreamResponse:
    if isinstance(found, web.StreamResponse):
        return found
    if isinstance(found, bytes):
        return web.Response(body=found, content_type="application/vnd.apache.parquet")
    return web.json_response(text=found.model_dump_json())


def report(model: type[M], record: Callable[[M], None]) -> Handler:
    """A route's handler that records a report of this model."""

    async def handler(request: Request) -> Answer:
        record(model.model_validate_json(request.body))
        return Ok()

    return handler
