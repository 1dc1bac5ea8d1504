"""The author of a run, or whoever holds its coordinator, its learner or a model folder, as the attacker of other machines.

    FOLDERS     what a learner may publish, or a stranger may hand over: each changes a model's folder in place
    TEMPLATES   chat templates that do not end, or that fill the memory
    grants      upload grants and links that a coordinator may answer with; `Trap` records what reaches it
    RELAYS      what a coordinator may name as a relay

Each must end in one sentence at an unchanged worker, validator, evaluator, site, `shoal serve` and `shoal audit`: nothing
runs, nothing goes out, nothing is filled. tests/adversary/test_author.py tries all of them.
"""

import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from shoal.protocol.messages import UploadGrant

PWNED = "SHOAL_TEST_PWNED"  # environment variable: the file that the attacker's code writes
CODE = f"import os, pathlib\npathlib.Path(os.environ[{PWNED!r}]).write_text('ran')\n"


def change(folder: Path, name: str, **fields: Any) -> None:
    """Set fields of a JSON file, and put a module beside it that leaves a mark if anything runs it."""
    path = folder / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | fields))
    (folder / "tk.py").write_text(CODE + "class X: pass\n")


def _setting(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder, name, **fields)


def _class_of_tokenizer(name: str) -> Callable[[Path], None]:
    """Let transformers read the tokenizer by a class that would load the model's code without asking Shoal."""

    def attack(folder: Path) -> None:
        change(folder, "config.json", auto_map={"AutoModel": "tk.X", "AutoConfig": "tk.X"}, model_type="gpt2")
        change(folder, "tokenizer_config.json", tokenizer_class=name)

    return attack


def _nested(folder: Path) -> None:
    own = {
        "AutoModel": "tk.X"
    }  # transformers uses its own code for the outer part, so this outer entry alone is harmless
    change(folder, "config.json", auto_map=own, text_config={"model_type": "llama", "auto_map": own})


def _deep(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}")


OWN = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tk.X", "tk.X"]}}
FOLDERS: dict[str, Callable[[Path], None]] = {
    "tokenizer with code": _setting("tokenizer_config.json", **OWN),
    "config with code": _setting("config.json", model_type="own", auto_map={"AutoConfig": "tk.X"}),
    "code of another repository": _setting("config.json", model_type="own", auto_map={"AutoConfig": "org/name--tk.X"}),
    "model with code": _setting("config.json", model_type="own", auto_map={"AutoModelForCausalLM": "tk.X"}),
    "part with code": _nested,
    "tokenizer read as a model": _class_of_tokenizer("AutoModelForCausalLM"),
    "tokenizer read as a config": _class_of_tokenizer("AutoConfig"),
    "tokenizer read as a processor": _class_of_tokenizer("AutoProcessor"),
    "tokenizer of tokenizers": _class_of_tokenizer("RagTokenizer"),
    "tokenizer with a dictionary": _class_of_tokenizer("BertJapaneseTokenizer"),
    "hub kernel": _setting("config.json", _attn_implementation="kernels-community/evil"),
    "hub kernel by its public name": _setting("config.json", attn_implementation="org/evil"),
    "hub kernel for experts": _setting("config.json", _experts_implementation="org/evil"),
    "hub kernel of a part": _setting("config.json", text_config={"model_type": "llama", "_attn_implementation": "org/evil"}),
    "no attention": _setting("config.json", _attn_implementation=None),
    "other attention": _setting("config.json", _attn_implementation="eager"),
    "quantised": _setting("config.json", quantization_config={"quant_method": "fp8"}),
    "other weights": _setting("config.json", transformers_weights="adapter_model.bin"),
    "other config": _setting("config.json", configuration_files=["config.4.0.0.json"]),
    "fused layers": _setting("config.json", fusion_config={"a": "b"}),
    "adapters": _setting("adapter_config.json", base_model_name_or_path="org/evil"),
    "sharded checkpoint": lambda folder: (folder / "shard-00000-model-00000-of-00001.safetensors").write_bytes(b""),
    "more parameters than files": _setting("config.json", intermediate_size=10**8),
    "layers without end": _setting("config.json", num_hidden_layers=10**7),
    "deep JSON": _deep,
    "endless settings": lambda folder: os.truncate(folder / "tokenizer.json", 1 << 30),
    "end tokens that are text": _setting("generation_config.json", eos_token_id=["a"]),
    "settings of wrong types": _setting("config.json", num_attention_heads="many"),
}  # fmt: skip

TEMPLATES = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless for one question only": "{% if '7' in messages[-1].content %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[-1].content }}",
    "8 GB": "{{ 'x' * 8000000000 }}",
    "100 MB": "{{ 'x' * 100000000 }}",
    "doubling": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
}


class Trap:
    """A server on loopback that records each request. It answers 200, or redirects to itself if `redirects`."""

    def __init__(self, *, redirects: bool = False) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []

        class Handler(BaseHTTPRequestHandler):
            def answer(handler) -> None:  # noqa: N805 - `self` is the trap
                self.requests.append((handler.command, handler.path, dict(handler.headers)))
                handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                handler.send_response(307 if redirects else 200)
                if redirects:
                    handler.send_header("Location", f"{self.url}/elsewhere")
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            do_GET = do_PUT = do_POST = do_HEAD = answer

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


BUCKET = "s3://shoal-files/runs/1"  # the bucket in the signed config of `grants`


def grants(trap: str) -> dict[str, UploadGrant]:
    """Return grants that a coordinator may answer with, if the config's bucket is BUCKET at the endpoint `trap`."""
    inside, query = f"{trap}/shoal-files/runs/1/incoming/x", "X-Amz-Signature=1"
    other = f"http://localhost:{trap.rpartition(':')[2]}"
    urls = {
        "another path": f"{trap}/v1/agent/leave?{query}",
        "another bucket": f"{trap}/other/runs/1/x?{query}",
        "another prefix": f"{trap}/shoal-files/runs/10/x?{query}",
        "out of the prefix": f"{trap}/shoal-files/runs/1/../../../v1/agent/leave?{query}",
        "out of the prefix, encoded": f"{trap}/shoal-files/runs/1/%2e%2e/%2E%2e/leave?{query}",
        "another host": f"{other}/shoal-files/runs/1/x?{query}",
        "another scheme": inside.replace("http:", "https:"),
        "a user": inside.replace("http://", "http://admin:admin@"),
        "another parameter": f"{inside}?token=x",
        "a subresource": f"{inside}?acl",
        "a fragment": f"{inside}?{query}#x",
        "no address": "file:///etc/passwd",
        "not a URL": "http://[",
    }
    made = {name: UploadGrant(url=url, headers={}) for name, url in urls.items()}
    headers = (
        "Host",
        "Authorization",
        "X-Aws-Ec2-Metadata-Token-Ttl-Seconds",
        "Transfer-Encoding",
        "Cookie",
        "Metadata-Flavor",
    )
    return made | {name: UploadGrant(url=f"{inside}?{query}", headers={name: "x"}) for name in headers}


RELAYS = [  # with {port}, where a service of the worker's machine listens
    "http://127.0.0.1:{port}/admin/reboot",
    "http://127.0.0.1:{port}/?x=1",
    "http://user:password@127.0.0.1:{port}",
    "http://127.0.0.1:{port}#x",
    "file:///etc/passwd",
]


def ran() -> bool:
    """Return whether the attacker's code ran."""
    return Path(os.environ[PWNED]).exists()
