"""The OpenAPI document: it has every route, and what the server answers at random requests is as it says."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.serve.openai.document import document

from .support import KEY, Running

PUBLIC = ("/v1/", "/health", "/metrics", "/openapi.json")


def test_every_public_route_is_described(api: Running) -> None:
    with api.client() as client:
        described = client.get("/openapi.json").json()
    assert described == document()
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in api.service.app().router.routes()
        if route.resource and route.resource.canonical.startswith(PUBLIC) and route.method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in described["paths"].items() for method in methods}


def test_every_reference_leads_to_a_schema() -> None:
    described = document()

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
            return own.union(*map(references, value.values()))
        return set[str]().union(*map(references, value)) if isinstance(value, list) else set()

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references(described["paths"]) <= known and references(described["components"]) <= known


@pytest.mark.slow
def test_random_requests_get_documented_answers(api: Running, tmp_path: Path) -> None:
    """No 5xx, no status, content type or shape that is not described; what the schema rules out is refused."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'schemathesis>=4,<5'")
    described = document()
    for name in ("ChatRequest", "CompletionRequest"):  # so that most of what is drawn is answered, soon
        fields = described["components"]["schemas"][name]["properties"]
        fields["model"] = {"const": api.model}
        fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 8}
        described["components"]["schemas"][name]["required"].append("max_tokens")
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    (tmp_path / "schemathesis.toml").write_text(
        "[checks.negative_data_rejection]\nexpected-statuses = [400, 401, 404, 405, 413, 415]\n"
    )
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "negative_data_rejection,unsupported_method,ignored_auth"
    )
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("run", "openapi.json", "--url", api.url, "--header", f"Authorization: Bearer {KEY}", "--checks", checks),
        *("--max-examples", "40", "--seed", "1", "--request-timeout", "60", "--phases", "examples,coverage,fuzzing"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, re.sub(r"(\w)\1{50,}", r"\1...", done.stdout)[-8000:]
