"""Request schemas of the API: OpenAI's parameters, with size limits.

Invariant: a parameter that could change the reply takes effect or is refused by name. Some clients send unsupported
parameters with neutral values. The parameters in `NEUTRAL_ONLY` are accepted with their neutral value only.
Left out: images, tools, and structured output. `top_p` and penalties are left out too, because only samples from the
full distribution can be replayed from a seed.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.section import GreedyOrWarm
from shoal.serve.detokenizer import MAX_STOP_CHARACTERS, MAX_STOPS
from shoal.serve.errors import RequestError

LongText = Annotated[str, Field(max_length=400_000)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
# Without `fail_fast` a list of a million wrong values produces a million errors.
Tokens = Annotated[list[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]], Field(max_length=1 << 20, fail_fast=True)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
Kind = TypeVar("Kind", bound=BaseModel)

FULL_DISTRIBUTION = "only the neutral value is supported: replies are sampled from the full distribution"
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
OTHERS = (
    "min_tokens", "ignore_eos", "best_of", "suffix", "reasoning_effort", "verbosity", "modalities", "functions",
    "function_call", "response_format", "tools", "tool_choice",
)  # fmt: skip
NEUTRAL_ONLY = dict.fromkeys(SAMPLING, FULL_DISTRIBUTION) | dict.fromkeys(OTHERS, "this value is not supported")


class RequestFields(BaseModel):
    """Strict fields, as in OpenAI's schema: no extra fields, and no string in place of a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(RequestFields):
    type: Literal["text"]
    text: LongText


class ChatMessage(RequestFields):
    role: Literal["system", "developer", "user", "assistant"]
    content: LongText | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]
    # Clients that send a reply back include these null fields.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text":
                raise ValueError(f"a part of type {str(kind)[:40]!r}: the models here read only text; remove the part")
        return content

    def as_template_message(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(RequestFields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; this server adds none


class CommonParams(RequestFields):
    """Parameters of both routes. Those of type Any do not affect the reply and are ignored."""

    model: Annotated[str, Field(max_length=300)]
    temperature: Annotated[float, GreedyOrWarm, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
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


class TextFormat(RequestFields):
    type: Literal["text"]


class ChatRequest(CommonParams):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2000, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    functions: None = None
    function_call: None = None
    # Shoal's own fields. In order, they ask for the run's system prompt and template, a target length, the reply file.
    as_trained: bool = False
    target_length: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    proof: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs: true", param="top_logprobs")
        return self

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_reply_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(CommonParams):
    prompt: (
        LongText
        | Tokens
        | Annotated[list[LongText], Field(max_length=64, fail_fast=True)]
        | Annotated[list[Tokens], Field(max_length=64, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 63)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 requires echo: true", param="max_tokens")
        return self


def parse_request(kind: type[Kind], data: bytes) -> Kind:
    """Parse and validate a body. Raise RequestError, naming the first invalid field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where, message = ".".join(map(str, first["loc"])) or "body", first["msg"].removeprefix("Value error, ")
        if param in NEUTRAL_ONLY:
            where, message = param, NEUTRAL_ONLY[param]
        elif first["type"] == "extra_forbidden":
            message = "this parameter is not supported"
        raise RequestError(f"{where}: {message}", param=param) from error
