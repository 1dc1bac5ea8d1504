"""The OpenAPI document of the API's routes. Requests are described by the models that parse them (`requests`).

Invariant: an answer has a status and a shape that stand here; a test asks at random and compares.
Left out: the chat page's own routes, which change with the page.
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from shoal import __version__
from shoal.serve.openai.requests import ChatRequest, CompletionRequest

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}
INTEGER: Json = {"type": "integer"}
OPENAPI = "3.1.0"


def _of(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _many(one: Json) -> Json:
    return {"type": "array", "items": one}


def _or_null(one: Json) -> Json:
    return {"anyOf": [one, {"type": "null"}]}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _const(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _likely(**more: Json) -> Json:
    return _object(token=TEXT, logprob=NUMBER, bytes=_many(INTEGER), **more)


def _answer(kind: str, choice: Json) -> Json:
    shoal = _object({"replies": _many({"type": "object"})}, seeds=_many(TEXT), weights=TEXT)
    return _object(
        id=TEXT,
        object=_const(kind),
        created=INTEGER,
        model=TEXT,
        choices=_many(choice),
        usage=_object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER),
        shoal=shoal,
    )


def _schemas() -> Json:
    call = _object(id=TEXT, type=_const("function"), function=_object(name=TEXT, arguments=TEXT))
    said = _object({"tool_calls": _many(call)}, role=_const("assistant"), content=_or_null(TEXT))
    chat_logprobs = _object(content=_many(_likely(top_logprobs=_many(_likely()))), refusal={"type": "null"})
    top = {"type": "object", "additionalProperties": NUMBER}
    text_logprobs = _object(
        tokens=_many(TEXT),
        token_logprobs=_many(_or_null(NUMBER)),
        top_logprobs=_or_null(_many(_or_null(top))),
        text_offset=_many(INTEGER),
    )
    ends = _const("stop", "length", "tool_calls")
    model = _object(id=TEXT, object=_const("model"), created=INTEGER, owned_by=TEXT)
    return {
        "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
        "Model": model,
        "Models": _object(object=_const("list"), data=_many(_of("Model"))),
        "Health": _object({"model": TEXT, "weights": TEXT, "behind": TEXT}, status=_const("ok", "loading")),
        "ChatAnswer": _answer(
            "chat.completion",
            _object(index=INTEGER, finish_reason=ends, logprobs=_or_null(chat_logprobs), message=said),
        ),
        "CompletionAnswer": _answer(
            "text_completion",
            _object(index=INTEGER, finish_reason=ends, logprobs=_or_null(text_logprobs), text=TEXT),
        ),
    }


REFUSED = {
    400: "the request cannot be answered as it asks; the message says why",
    401: "no key, or an unknown one",
    404: "there is no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests; Retry-After says when to ask again",
    503: "no model is loaded yet, or no place is free; Retry-After says when to ask again",
}


def _operation(summary: str, answer: Json, refused: tuple[int, ...] = (), body: str = "", **more: Any) -> Json:
    error = {"application/json": {"schema": _of("Error")}}
    responses: Json = {"200": {"description": "OK", "content": answer}}
    responses |= {str(status): {"description": REFUSED[status], "content": error} for status in refused}
    operation = {"summary": summary, "responses": responses, **more}
    if body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _of(body)}}}
    return operation


def _json(name: str) -> Json:
    return {"application/json": {"schema": _of(name)}}


def document() -> Json:
    """OpenAPI 3.1."""
    _, requests = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    streamed = {"text/event-stream": {"schema": TEXT}}
    asking = (400, 401, 404, 408, 413, 415, 429, 503)
    health = _operation("Whether a model is loaded", _json("Health"), security=[])
    health["responses"]["503"] = {"description": "not yet", "content": _json("Health")}
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths = {
        "/health": {"get": health},
        "/metrics": {"get": _operation("Prometheus' text format", {"text/plain": {"schema": TEXT}}, security=[])},
        "/openapi.json": {
            "get": _operation("This document", {"application/json": {"schema": {"type": "object"}}}, security=[])
        },
        "/v1/models": {"get": _operation("The models that there are", _json("Models"), (401,))},
        "/v1/models/{id}": {"get": _operation("One of them", _json("Model"), (401, 404), parameters=[id])},
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation", _json("ChatAnswer") | streamed, asking, "ChatRequest")
        },
        "/v1/completions": {
            "post": _operation("Continue a text", _json("CompletionAnswer") | streamed, asking, "CompletionRequest")
        },
    }
    return {
        "openapi": OPENAPI,
        "info": {"title": "shoal serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": requests["$defs"] | _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
