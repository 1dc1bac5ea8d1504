"""What the chat page may send: every body's fields, bounded; unknown ones are refused. Called by `routes`."""

from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.serve.chat.conversations import MESSAGE_CHARACTERS
from shoal.web.guard import RefusedError, json_body

SMALL_BYTES, LARGE_BYTES = 4096, 4 * MESSAGE_CHARACTERS + 4096
Kind = TypeVar("Kind", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Credentials(Strict):
    name: Annotated[str, Field(max_length=200)]
    password: Annotated[str, Field(max_length=2000)]


class Asked(Strict):
    """A new message (`content`), or another reply to the message `parent`."""

    content: Annotated[str, Field(min_length=1, max_length=MESSAGE_CHARACTERS)] | None = None
    parent: Annotated[str, Field(max_length=40)] | None = None
    models: Annotated[list[Annotated[str, Field(max_length=300)]], Field(min_length=1, max_length=2)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    target: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    as_trained: bool = False


class Change(Strict):
    title: Annotated[str, Field(max_length=200)] | None = None
    leaf: Annotated[str, Field(max_length=40)] | None = None


async def body(request: web.Request, kind: type[Kind], most_bytes: int) -> Kind:
    """Raises RefusedError."""
    return parsed(await json_body(request, most_bytes), kind)


def parsed(data: bytes, kind: type[Kind]) -> Kind:
    """Raises RefusedError."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise RefusedError(400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
