"""Unchanged nodes and commands meet a hostile author (`benchmarks/trust/adversary/author.py`): nothing runs or goes out."""

import builtins
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.trust.adversary import author

from shoal.cli.main import main
from shoal.config import Config
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ModelError
from shoal.evals.examiner import Examiner
from shoal.model import template
from shoal.model.load import eos_ids, load_model, load_tokenizer
from shoal.model.support import UnsupportedModelError
from shoal.model.training import open_sharded
from shoal.protocol.calling import NodeError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import HeartbeatAnswer
from shoal.protocol.node import Bounds, Node
from shoal.serve import proof
from shoal.serve.versions import ModelSource, Versions
from shoal.shardcast import Client, Origin, ShardStore
from shoal.shardcast.fetch import RefusedVersionError
from shoal.shardcast.fetch.client import fetch_published
from shoal.tasks import Task
from shoal.tasks.prompt import ChatTemplateError, prompt_tokens
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

from ..cli.support import wait_until
from ..cli.test_origin_and_relay import Site
from ..protocol.support import FakeCoordinator, NoPauses, join
from ..workers import ALICE, RUN, config

CONFIG = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6, "group_size": 3})


@pytest.fixture(autouse=True)
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the attacker's code ran, or if anything asked the operator."""
    monkeypatch.setenv(author.PWNED, str(tmp_path / "pwned"))

    def ask(*_: object) -> str:
        pytest.fail("a question to the operator: its answer would decide whether a stranger's code runs")

    monkeypatch.setattr(builtins, "input", ask)
    yield
    assert not author.ran()


@pytest.fixture(params=sorted(author.FOLDERS))
def hostile(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "hostile"))
    author.FOLDERS[request.param](folder)
    return folder


def refused(error: BaseException) -> None:
    text = str(error)
    assert isinstance(error, ModelError) and text and "\n" not in text and "hostile" in text, repr(error)


# --- folders of models: the loader, and every role that loads -----------------------------------------------------------


def test_a_hostile_folder_is_refused_in_one_sentence(hostile: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(hostile)
        load_tokenizer(hostile)
        eos_ids(hostile)
    refused(caught.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("config.json", {"_attn_implementation_autoset": True}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "tk.X", "AutoConfig": "tk.X"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "tk.X"]}}),
        ("config.json", {"quantization_config": None}),
    ],
)
def test_settings_that_published_models_have_do_no_harm(
    name: str, fields: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """transformers has its own code for these models, and uses it."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    author.change(folder, name, **fields)
    load_model(folder)
    load_tokenizer(folder)


def test_a_worker_a_validator_and_an_evaluator_keep_what_they_have(hostile: Path, tiny_folder: Path) -> None:
    with Judge(CONFIG, RUN, "float32") as judge:
        producer, engine = Producer(CONFIG, RUN, ALICE, TorchEngine("float32")), TorchEngine("float32")
        loads = (
            lambda folder: producer.load(folder, 0),
            judge.load,
            lambda folder: Examiner(CONFIG, {}).load(engine, folder),
        )
        for load in loads:
            with pytest.raises(ModelError) as caught:
                load(hostile)
            refused(caught.value)
            load(tiny_folder)  # nothing of the hostile version stays
        assert producer.tokenizer.name_or_path == str(tiny_folder) and judge.tokenizer.name_or_path == str(tiny_folder)
        producer.close()


def test_a_learner_or_a_site_refuses_it(hostile: Path) -> None:
    """A site, and each rank of a learner, opens the run's model by `open_sharded`, or else by `load_model`."""
    with pytest.raises(UnsupportedModelError) as caught:
        open_sharded(hostile, "cpu", "fast", lambda root, dtype: None)
        load_tokenizer(hostile)
        eos_ids(hostile)
    refused(caught.value)


async def test_shoal_serve_refuses_it_and_keeps_serving(hostile: Path, tiny_folder: Path, tmp_path: Path) -> None:
    served = tmp_path / "versions"
    shutil.copytree(tiny_folder, served / "v000001")
    versions = Versions(ModelSource("run", served, None), lambda: TorchEngine("float32"))
    await versions.poll()
    assert versions.newest is not None and versions.newest.offer.version == 1
    shutil.copytree(hostile, served / "v000002")
    await versions.poll()
    assert versions.newest.offer.version == 1 and "v000002" in versions.failure and "\n" not in versions.failure
    versions.close()


@pytest.mark.parametrize("command", ["serve", "audit"])
def test_the_commands_end_with_status_2_and_one_line(
    command: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "hostile"))
    author.FOLDERS["tokenizer with code"](folder)
    (tmp_path / "reply.json").write_text('{"format": 1}')
    monkeypatch.setattr(proof.Reply, "read", lambda data: SimpleNamespace(version=None))
    arguments = {
        "serve": ["serve", str(folder), "--api-only", "--port", "0", "--dir", str(tmp_path / "serve")],
        "audit": ["audit", str(tmp_path / "reply.json"), "--model", str(folder)],
    }
    assert main(arguments[command]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "never runs" in error


# --- templates ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorter limits. What is tested does not depend on speed: these templates never end."""
    monkeypatch.setattr(template, "LIMITS", replace(template.LIMITS, cpu_s=0.5))
    template._renderer.cache_clear()
    yield
    template._renderer().close()
    template._renderer.cache_clear()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", sorted(author.TEMPLATES))
def test_a_template_ends_within_its_limits(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "hostile"))
    (folder / "chat_template.jinja").write_text(author.TEMPLATES[name])
    tokenizer = load_tokenizer(folder)
    with pytest.raises((UnsupportedModelError, ChatTemplateError), match="hostile"):
        prompt_tokens(tokenizer, CONFIG.tasks, Task(id="a", question="3 + 7", answer="10"), 0)


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "a<eos> b "}], [{"role": "system", "content": "", "name": None}]]
)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tokenize": False}, {"return_dict": False}])
def test_a_template_gives_what_transformers_gives(tiny_folder: Path, messages: Any, options: dict[str, bool]) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    expected = type(tokenizer).apply_chat_template(tokenizer, messages, **options)
    assert tokenizer.apply_chat_template(messages, **options) == expected


# --- a coordinator's addresses ------------------------------------------------------------------------------------------


def node_of(folder: Path, config: Config, answers: dict[str, str], **options: Any) -> Any:
    coordinator = FakeCoordinator(config=config.model_dump(mode="json"))
    coordinator.answers |= answers
    node = join(coordinator, folder, stop=NoPauses(), **options)
    node.config()
    return node


@pytest.mark.parametrize("name", sorted(author.grants("http://127.0.0.1:1")))
def test_a_grant_outside_the_configs_bucket_sends_nothing(tmp_path: Path, name: str) -> None:
    with author.Trap() as trap:
        pool = config(store={"url": author.BUCKET, "endpoint": trap.url}, relays={"reach": "local"})
        grant = author.grants(trap.url)[name]
        node = node_of(tmp_path, pool, {"/v1/submissions/a/grant": grant.model_dump_json()})
        node.reach = "local"
        with pytest.raises(NodeError) as caught:
            node.send_file("/v1/submissions/a", b"rows")
        assert not caught.value.restart_helps and "\n" not in str(caught.value)
        assert trap.requests == []


def test_a_bucket_cannot_redirect_and_gets_only_the_granted_headers(tmp_path: Path) -> None:
    with author.Trap(redirects=True) as trap:
        pool = config(store={"url": author.BUCKET, "endpoint": trap.url}, relays={"reach": "local"})
        url = f"{trap.url}/shoal-files/runs/1/incoming/x?X-Amz-Signature=%2F1"
        grant = f'{{"url": "{url}", "headers": {{"If-None-Match": "*", "content-length": "4"}}}}'
        node = node_of(tmp_path, pool, {"/v1/submissions/a/grant": grant}, patience_s=0.3)
        node.reach = "local"
        with pytest.raises(NodeError, match="status 307"):
            node.send_file("/v1/submissions/a", b"rows")
        assert {path for _, path, _ in trap.requests} == {"/shoal-files/runs/1/incoming/x?X-Amz-Signature=%2F1"}
        headers = {name.lower() for _, _, sent in trap.requests for name in sent}
        assert headers <= {"host", "accept", "accept-encoding", "user-agent", "content-length", "if-none-match"}


def test_a_bucket_beyond_the_nodes_own_reach_gets_nothing(tmp_path: Path) -> None:
    """The config says that loopback is within reach, but the coordinator's own address is a name elsewhere."""
    with author.Trap() as trap:
        pool = config(store={"url": author.BUCKET, "endpoint": trap.url}, relays={"reach": "local"})
        grant = f'{{"url": "{trap.url}/shoal-files/runs/1/x?X-Amz-Signature=1", "headers": {{}}}}'
        link = f'{{"url": "{trap.url}/shoal-files/runs/1/x?X-Amz-Signature=1", "hash": "{"0" * 64}"}}'
        answers = {"/v1/submissions/a/grant": grant, "/v1/submissions/a/link": link}
        node = node_of(tmp_path, pool, answers, patience_s=0.3)
        assert node.reach == "public"
        for call in (
            lambda: node.send_file("/v1/submissions/a", b"rows"),
            lambda: node.fetch_file("/v1/submissions/a", max_bytes=9),
        ):
            with pytest.raises(NodeError, match="a local address"):
                call()
        assert trap.requests == []


@pytest.mark.parametrize("relay", author.RELAYS)
def test_a_relays_address_is_an_address_and_nothing_else(tmp_path: Path, relay: str) -> None:
    answer = HeartbeatAnswer.model_construct(state="running", newest_version=0, relays=[relay.format(port=1)])
    node = node_of(tmp_path, CONFIG, {"/v1/heartbeat": answer.model_dump_json()})
    with pytest.raises(NodeError, match="relays"):
        node.beat()


# --- what a learner publishes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tk.py": b"1"}, "tk.py"),
        ({"pytorch_model.bin": b"1"}, "pytorch_model.bin"),
        ({"adapter_config.json": b"{}"}, "adapter_config.json"),
        ({"config.4.0.0.json": b"{}"}, "config.4.0.0.json"),
        ({"a/model.safetensors": b"1"}, "a/model.safetensors"),
        ({"model.safetensors.index.json": b"{}"}, "index.json"),
        ({"model.safetensors": bytes(300_000)}, "--disk"),
    ],
)
def test_a_version_of_other_files_or_of_too_many_bytes_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], why: str
) -> None:
    folder = tmp_path / "version"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    origin = Origin(ShardStore(tmp_path / "store"), ALICE.private_key, run=RUN)
    manifest = origin.publish(folder, 0)
    monkeypatch.setattr(Node, "bounds", Bounds(disk_bytes=100_000))
    node = node_of(tmp_path / "node", CONFIG, {})
    assert why in node.refuses(manifest)
    node.beat()
    assert node.refused.startswith("version 0: ") and why in node.refused


def test_logs_of_a_refusal_are_one_line(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = node_of(tmp_path, CONFIG, {})
    with caplog.at_level(logging.ERROR):
        node.refuse(3, UnsupportedModelError("/home/bob/weights/v000003: a\x1b[2J\nb"))
    assert node.refused == "version 3: v000003: a?[2J" and "\n" not in caplog.messages[0]


def test_unchanged_nodes_download_nothing_of_a_hostile_learners_version_and_say_why(tmp_path: Path) -> None:
    """A real coordinator, origin and relay on loopback: the relay mirrors nothing, a worker reserves nothing."""
    (tmp_path / "coordinator").mkdir()
    site = Site(tmp_path)
    origin, relay = site.origin(), site.relay()
    worker = Node.join(site.invite("worker"), tmp_path / "worker")
    try:
        hostile = site.watched / ".v000000"
        hostile.mkdir()
        (hostile / "model.safetensors").write_bytes(bytes(1_000))
        (hostile / "tk.py").write_text(author.CODE)
        hostile.rename(site.watched / "v000000")
        wait_until(lambda: bool(site.announced()) and "tk.py" in site.node("relay").stats.doing)
        worker.beat()  # its answer has the permission to read
        publisher = Identity.load(tmp_path / "origin" / "identity.pem").public
        client = Client([site.node("origin").url], worker.access(publisher, worker.config()), tmp_path / "cache")
        with pytest.raises(RefusedVersionError, match="tk.py"):
            fetch_published(client, 0)
        worker.beat()
        assert worker.refused.startswith("version 0: ") and not [
            path for path in (tmp_path / "cache").rglob("*") if path.is_dir()
        ]
        site.write(1)
        wait_until(lambda: site.node("relay").policy_version == 1)
    finally:
        ended = [relay.stopped(), origin.stopped(), site.coordinator.stopped()]
    assert ended[:2] == ["stopped", "stopped"], "a hostile version ends no node"
