"""What a client of the API may ask: OpenAI's parameters, bounded. Anything that would be ignored is refused by name.

Invariant: a request that is accepted is answered as it asks; a parameter without effect on the text may be sent.
Called by `routes`. Left out: images, `top_p` and penalties (a seed replays only the full distribution),
`response_format`, schemas that are enforced.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.errors import ShoalError
from shoal.serve.decoding.text import STOP_CHARACTERS, STOPS

Words = Annotated[str, Field(max_length=400_000)]
StopString = Annotated[str, Field(max_length=STOP_CHARACTERS)]
# Without `fail_fast` a list of a million wrong values makes a million errors.
Tokens = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Kind = TypeVar("Kind", bound=BaseModel)


class RequestError(ShoalError):
    """A request in a wrong shape. `param`: the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: Words


class Called(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=64)]
    arguments: Words

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError("not JSON") from error
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return text


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: Annotated[str, Field(max_length=100)]
    type: Literal["function"]
    function: Called


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Words | Annotated[list[Part], Field(max_length=256, fail_fast=True)] | None = None
    name: str | None = Field(default=None, max_length=100)
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=100)

    @model_validator(mode="after")
    def _of_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("only a message of role tool has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def said(self) -> dict[str, Any]:
        """As templates read it: the arguments of a call as an object, not as text."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "id": call.id, "function": _as_object(call.function)} for call in self.tool_calls
            ]
        if self.role == "tool":
            found["tool_call_id"] = self.tool_call_id
            found |= {"name": self.name} if self.name else {}
        return found


def _as_object(called: Called) -> dict[str, Any]:
    return {"name": called.name, "arguments": json.loads(called.arguments)}


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # nothing enforces a schema


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Common(BaseModel):
    """Both routes' parameters. The last ones have no effect here, whatever they are."""

    model_config = ConfigDict(extra="forbid")
    model: Annotated[str, Field(max_length=300)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None

    @model_validator(mode="after")
    def _no_silent_change(self) -> "Common":
        if self.top_p not in (None, 1, 1.0):
            raise ValueError("top_p is not supported: replies are sampled from the full distribution")
        if self.frequency_penalty or self.presence_penalty or self.logit_bias:
            raise ValueError(
                "penalties and logit_bias are not supported: replies are sampled from the full distribution"
            )
        if self.stream_options and not self.stream:
            raise ValueError("stream_options goes with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=2000, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Of Shoal: the run's system prompt and template, a length target, and the reply file in the answer.
    as_trained: bool = False
    target_length: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    proof: bool = False

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Common):
    prompt: (
        Words
        | Tokens
        | Annotated[list[Words], Field(max_length=64, fail_fast=True)]
        | Annotated[list[Tokens], Field(max_length=64, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


def read(kind: type[Kind], data: bytes) -> Kind:
    """Raises RequestError, naming the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        message = "this parameter is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {message}", param=param) from error
