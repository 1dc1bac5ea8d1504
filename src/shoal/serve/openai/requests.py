"""What a client of the API may ask: OpenAI's parameters, bounded. Anything that would be ignored is refused by name.

Invariant: a request that is accepted is answered as it asks. Of a parameter that is not supported, the values that change
nothing are accepted (`ONLY`).
Left out: images, `top_p`, penalties (a seed replays only the full distribution).
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.serve.errors import RequestError
from shoal.serve.text import STOP_CHARACTERS, STOPS

Words = Annotated[str, Field(max_length=400_000)]
StopString = Annotated[str, Field(max_length=STOP_CHARACTERS)]
# Without `fail_fast` a list of a million wrong values makes a million errors.
Tokens = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
Kind = TypeVar("Kind", bound=BaseModel)


# Parameters of which only the values that change nothing are supported.
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
ONLY = dict.fromkeys(
    SAMPLING,
    "only the value that changes nothing: replies are sampled from the full distribution, which a seed replays",
) | {
    "min_tokens": "only 0 is supported",
    "ignore_eos": "only false is supported: a reply ends where the model ends it",
    "best_of": "only 1 is supported; n asks for several completions",
    "suffix": "only an empty one is supported: models here continue a text, they fill no gap",
    "reasoning_effort": 'only "none" is supported; runs with length targets take target_length',
    "verbosity": 'only "medium" is supported',
    "modalities": 'only ["text"] is supported: models here read and write text',
    "functions": "send tools in its place",
    "function_call": "send tool_choice in its place",
}


class RequestFields(BaseModel):
    """As OpenAPI says: no other fields, and no text in place of a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(RequestFields):
    type: Literal["text"]
    text: Words


class Called(RequestFields):
    name: Annotated[str, Field(max_length=64)]
    arguments: Words

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError("not JSON") from error
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return text or "{}"


class ToolCall(RequestFields):
    id: Annotated[str, Field(max_length=100)]
    type: Literal["function"]
    function: Called


class ChatMessage(RequestFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Words | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)] | None = None
    name: str | None = Field(default=None, max_length=100)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=100)
    # What clients send back of an answer without these.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text":
                raise ValueError(f"a part of type {str(kind)[:40]!r}: models here read text alone; leave it out")
        return content

    @model_validator(mode="after")
    def _of_its_role(self) -> "ChatMessage":
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


class ToolFunction(RequestFields):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestFields):
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(RequestFields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against observers of packet sizes; there is none


class Common(RequestFields):
    """Both routes' parameters. The last ones have no effect here, whatever they are."""

    model: Annotated[str, Field(max_length=300)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: One | None = None
    top_k: Literal[-1, 0] | None = None
    min_p: Zero | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)


class ToolName(RequestFields):
    name: Annotated[str, Field(max_length=64)]


class NamedTool(RequestFields):
    type: Literal["function"]
    function: ToolName


class PlainFormat(RequestFields):
    type: Literal["text", "json_object"]


class ReplySchema(RequestFields):
    name: Annotated[str, Field(max_length=100)]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # it is followed in any case


class SchemaFormat(RequestFields):
    type: Literal["json_schema"]
    json_schema: ReplySchema


class ChatRequest(Common):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2000, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    functions: None = None
    function_call: None = None
    # Of Shoal: the run's system prompt and template, a length target, and the reply file in the answer.
    as_trained: bool = False
    target_length: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    proof: bool = False

    @model_validator(mode="after")
    def _together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs: true", param="top_logprobs")
        forces_calls = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        if self.schema_of_reply is not None and self.tools and self.tool_choice != "none":
            raise RequestError("response_format and tools: a reply is one or the other", param="response_format")
        if self.proof and (forces_calls or self.schema_of_reply is not None):
            raise RequestError("a reply whose form is forced has no proof: leave proof out", param="proof")
        return self

    @property
    def schema_of_reply(self) -> dict[str, Any] | None:
        """What response_format asks for."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if self.response_format and self.response_format.type == "json_object" else None

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
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _together(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 goes with echo: true", param="max_tokens")
        return self


def read(kind: type[Kind], data: bytes) -> Kind:
    """Raises RequestError, naming the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where, message = ".".join(map(str, first["loc"])) or "body", first["msg"].removeprefix("Value error, ")
        if param in ONLY:
            where, message = param, ONLY[param]
        elif first["type"] == "extra_forbidden":
            message = "this parameter is not supported"
        raise RequestError(f"{where}: {message}", param=param) from error
