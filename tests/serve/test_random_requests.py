"""Random requests are generated from the request schemas. None may get a 5xx response; invalid ones must be refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic.json_schema import models_json_schema

from shoal.serve.openai.requests import ChatRequest, CompletionRequest

from .support import KEY, Running

ROUTES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


def openapi(model: str) -> dict[str, Any]:
    """Return the OpenAPI description of both routes, in which `model` is the only model."""
    template = "#/components/schemas/{model}"
    _, definitions = models_json_schema([(kind, "validation") for kind in ROUTES.values()], ref_template=template)
    schemas: dict[str, Any] = definitions["$defs"]
    for kind in ROUTES.values():
        schemas[kind.__name__]["properties"] |= {
            "model": {"const": model},
            "ignore_eos": {"enum": [None, False, 0]},  # pydantic accepts 0 for False, because they are equal in Python
            "min_tokens": {"enum": [None, False, 0]},
            "top_k": {"enum": [None, False, 0, -1]},
        }
    paths = {}
    for path, kind in ROUTES.items():
        body = {"application/json": {"schema": {"$ref": template.format(model=kind.__name__)}}}
        responses = {status: {"description": "a response"} for status in ("200", "4XX")}
        paths[path] = {"post": {"requestBody": {"required": True, "content": body}, "responses": responses}}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shoal serve", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": key},
        "security": [{"key": []}],
    }


@pytest.mark.slow
def test_random_requests_are_answered_or_refused(api: Running, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'schemathesis>=4,<5'")
    (tmp_path / "openapi.json").write_text(json.dumps(openapi(api.model)))
    (tmp_path / "schemathesis.toml").write_text(
        "[checks.negative_data_rejection]\nexpected-statuses = [400, 401, 404, 405, 413, 415]\n"
    )
    checks = "not_a_server_error,negative_data_rejection,unsupported_method,ignored_auth"
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("run", "openapi.json", "--url", api.url, "--header", f"Authorization: Bearer {KEY}", "--checks", checks),
        *("--max-examples", "40", "--seed", "1", "--request-timeout", "60", "--phases", "examples,coverage,fuzzing"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, re.sub(r"(\w)\1{50,}", r"\1...", done.stdout)[-8000:]
