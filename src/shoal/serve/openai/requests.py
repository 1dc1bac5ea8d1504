"""Request schemas of the API: OpenAI's parameters, bounded. A parameter that would be ignored is refused by name.

Invariant: every accepted parameter takes effect. An unsupported parameter is accepted only with the value that changes
nothing (`ONLY`).
Left out: images, `top_p`, penalties (a seed replays only the full distribution).
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.serve.errors import RequestError
from shoal.serve.text import STOP_CHARACTERS, STOPS

Words = Annotated[str, Field(max_length=400_000)]
StopString = Annotated[str, Field(max_length=STOP_CHARACTERS)]
# Without `fail_fast` a list of a million wrong values produces a million errors.
Tokens = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
Kind = TypeVar("Kind", bound=BaseModel)


# Parameters for which only the neutral value is accepted, with the error message.
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
ONLY = dict.fromkeys(
    SAMPLING,
    "only the neutral value is supported: replies are sampled from the full distribution, which a seed replays",
) | {
    "min_tokens": "only 0 is supported",
    "ignore_eos": "only false is supported: a reply ends where the model ends it",
    "best_of": "only 1 is supported; n asks for several completions",
    "suffix": "only an empty one is supported: these models continue a text and do not infill",
    "reasoning_effort": 'only "none" is supported; runs with length targets take target_length',
    "verbosity": 'only "medium" is supported',
    "modalities": 'only ["text"] is supported: models here read and write text',
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
}


class RequestFields(BaseModel):
    """Strict fields, as OpenAI's schema: no extra fields, no string for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(RequestFields):
    type: Literal["text"]
    text: Words


class FunctionCall(RequestFields):
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
    function: FunctionCall


class ChatMessage(RequestFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Words | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)] | None = None
    name: str | None = Field(default=None, max_length=100)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=100)
    # Clients echo these null fields of a reply.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text":
                raise ValueError(f"a part of type {str(kind)[:40]!r}: models here read only text; leave it out")
        return content

    @model_validator(mode="after")
    def _fits_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of role assistant has tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("only a message of role tool has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def as_template_message(self) -> dict[str, Any]:
        """Return the message for the chat template, with call arguments as objects."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": _as_object(call.function)} for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
            message |= {"name": self.name} if self.name else {}
        return message


def _as_object(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": json.loads(call.arguments)}


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
    include_obfuscation: bool | None = None  # padding against traffic analysis; this server adds none


class Common(RequestFields):
    """Parameters of both routes. Those typed Any are accepted and ignored."""

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
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


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
    strict: bool | None = None  # the schema is always enforced


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
    # Shoal's own: use the run's system prompt and template; a length target; include the reply file.
    as_trained: bool = False
    target_length: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    proof: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs: true", param="top_logprobs")
        forces_calls = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        if self.schema_of_reply is not None and self.tools and self.tool_choice != "none":
            raise RequestError("response_format and tools: use one or the other", param="response_format")
        if self.proof and (forces_calls or self.schema_of_reply is not None):
            raise RequestError("a reply whose form is forced has no proof: leave proof out", param="proof")
        return self

    @property
    def schema_of_reply(self) -> dict[str, Any] | None:
        """The JSON schema that response_format requires, if any."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if self.response_format and self.response_format.type == "json_object" else None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_reply_tokens(self) -> int | None:
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
    def _consistent(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 goes with echo: true", param="max_tokens")
        return self


def read(kind: type[Kind], data: bytes) -> Kind:
    """Parse and validate a body. Raise RequestError, naming the first field at fault."""
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
