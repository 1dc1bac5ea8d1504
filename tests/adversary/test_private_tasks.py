"""A worker gets prompts only: no answer, test, reward, setting of a reward, origin or held-out task reaches it.

The pool, its worker and its validator are real and speak HTTP. SECRET is in everything that a worker must not see, the
folder of the sources included.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from shoal.cli.roles import task_set
from shoal.config import Config, parse
from shoal.coordinator.folder import create_invite
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import ClaimRequest, Claims, Ok, Opinion, PolicyVersion, Role, Stored
from shoal.protocol.node import Node
from shoal.store.rollouts import read_accepted
from shoal.tasks import TaskSet
from shoal.tasks.compiling import build_tasks, read_built
from shoal.tasks.derive import plan_submission
from shoal.tasks.prompt import prompt_tokens
from shoal.tasks.taskset import TaskManifest
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.validator.verdict import Result, group_results
from shoal.worker.produce import Producer

from ..conftest import tiny_tokenizer
from ..coordinator.http.support import ANYONE, PATIENCE_S, RUN, served
from ..coordinator.http.test_routes import ALLOWED, OPEN
from ..turns import MAX_TOKENS, MAX_TURNS
from ..workers import assignment

pytestmark = pytest.mark.usefixtures("one_thread")
SECRET, HELD_OUT, ROWS = "sesame", 8, 40
GROUPS, GROUP_SIZE = 2, 4
REWARD = f'''
def exact(task, completion):
    """{SECRET}"""
    if task.answer[-1] in "13579":
        raise ValueError(task.answer)  # a message that quotes the answer
    return (len(completion) % 3 - 1) / 2
'''
ENVIRONMENT = """
class Tool:
    def respond(self, task, seed, turns):
        assert sorted(vars(task)) == ["metadata", "question", "source"]
        return None if len(turns) > 2 else str(task.metadata["shown"] + len(turns))
"""


class Recorded(httpx.HTTPTransport):
    """Keeps every byte that its client receives."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        body = response.read()
        self.received.append(repr(response.headers).encode() + body)
        return httpx.Response(response.status_code, headers=response.headers, content=body)


@dataclass
class Member:
    node: Node
    config: Config
    tasks: TaskSet
    transport: Recorded

    def get(self, path: str) -> httpx.Response:
        return self.node.client.get(path)


@dataclass
class Pool:
    folder: Path
    config: Config
    worker: Member
    validator: Member

    def join(self, role: Role) -> tuple[Node, Recorded]:
        transport = Recorded()
        invite = create_invite(self.folder, role, role, None, 1)
        return Node.join(invite, self.folder.parent / role, patience_s=PATIENCE_S, transport=transport), transport


def settings(folder: Path) -> Config:
    rows = [{"text": f"{n:03}+007", "gold": f"{SECRET}\n#### {n}", "more": {"shown": n}} for n in range(ROWS)]
    coded = [
        {"question": f"{n:03}+008", "tests": {"kind": "stdin", "cases": [{"input": SECRET, "output": SECRET}]}}
        | {"answer": SECRET, "metadata": {"solution": SECRET}}
        for n in range(ROWS)
    ]
    for name, lines in ((f"{SECRET}-own.jsonl", rows), (f"{SECRET}-code.jsonl", coded)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "my_env.py").write_text(ENVIRONMENT)
    own = {
        "path": str(folder / f"{SECRET}-own.jsonl"),
        "fields": {"question": "text", "answer": "gold", "metadata": "more"},
    }
    own |= {"name": "own", "environment": f"{folder / 'my_env.py'}:Tool", "weight": 3}
    own |= {"reward": {f"{folder / 'my_rewards.py'}:exact": 0.75, "number": 0.0}}
    code = {"name": "code", "path": str(folder / f"{SECRET}-code.jsonl"), "split": "train"}
    return parse(
        {
            "tasks": {"sources": [own, code], "heldout": HELD_OUT, "prompt": "{question}=", "length_targets": [8, 16]}
            | {"length_penalty": 0.0625},
            "sampling": {"max_tokens": MAX_TOKENS, "max_turns": MAX_TURNS, "group_size": GROUP_SIZE},
            "workers": {"groups_per_submission": GROUPS},
            "coordinator": {"prompts_per_step": 4},
            "learner": {"optimizer_steps_per_step": 1},
            "evaluator": {"n": HELD_OUT},
        }
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    base = tmp_path_factory.mktemp(f"{SECRET}-pool")
    config, _ = build_tasks(settings(base), base / "coordinator" / "tasks")
    with served(base / "coordinator", config):
        made = Pool(base / "coordinator", config, None, None)  # type: ignore[arg-type]
        origin, _ = made.join("origin")
        origin.post("/v1/policies", PolicyVersion(version=0, digest="d" * 64, size_bytes=1), Ok)
        for role in ("worker", "validator"):
            node, transport = made.join(role)
            received = node.config()
            setattr(made, role, Member(node, received, task_set(node, received, base / role), transport))
        yield made


def test_worker_and_validator_derive_the_same_tasks_prompts_and_targets(pool: Pool) -> None:
    tokenizer, drawn = tiny_tokenizer(), set()
    for number in range(40):
        made = []
        for member in (pool.worker, pool.validator):
            plans = plan_submission(member.config, RUN, assignment(number), "a" * 64, member.tasks)
            tasks = [member.tasks.train[plan.task_index] for plan in plans]
            prompts = [
                prompt_tokens(tokenizer, member.config.tasks, task, plan.target_length)
                for task, plan in zip(tasks, plans, strict=True)
            ]
            made.append((plans, prompts, [(task.question, task.source) for task in tasks]))
            drawn |= {task.source for task in tasks}
        assert made[0] == made[1]
    assert drawn == {"own", "code"}
    assert len(pool.worker.tasks.train) == len(pool.validator.tasks.train) == 2 * ROWS - HELD_OUT


def test_a_worker_has_no_answers_and_metadata_only_for_the_users_environment(pool: Pool) -> None:
    for task, whole in zip(pool.worker.tasks.train, pool.validator.tasks.train, strict=True):
        assert (task.id, task.answer, task.tests, task.reward) == ("", "", "", "")
        assert task.metadata == (whole.metadata if task.source == "own" else "")
        assert SECRET in whole.answer
    assert len(pool.worker.tasks.heldout) == 0 and len(pool.validator.tasks.heldout) == HELD_OUT
    assert list(pool.worker.tasks.files) == ["my_env.py"]
    assert sorted(pool.validator.tasks.files) == ["my_env.py", "my_rewards.py"]


def test_a_workers_config_has_nothing_of_rewards_and_of_where_tasks_come_from(pool: Pool) -> None:
    tasks = pool.worker.config.tasks
    assert [(s.label, s.weight, s.environment, s.reward) for s in tasks.sources] == [
        ("own", 3, "my_env.py:Tool", ""),
        ("code", 1, "", ""),
    ]
    assert tasks.length_penalty != pool.config.tasks.length_penalty and tasks.digest != pool.config.tasks.digest
    same = ("prompt", "system", "length_targets", "sandbox")
    assert all(getattr(tasks, name) == getattr(pool.config.tasks, name) for name in same)
    assert pool.validator.config == pool.config


def test_no_file_of_the_whole_set_is_served_to_a_worker(pool: Pool) -> None:
    built = read_built(pool.folder / "tasks")
    assert built is not None
    manifest = TaskManifest.decode((pool.folder / "tasks" / built.digest).read_bytes())
    chunks = [chunk for source in manifest.sources for chunk in source.chunks] + manifest.heldout
    names = {built.digest, manifest.files["my_rewards.py"], *(chunk.sha256 for chunk in chunks)}
    assert len(names) == 5
    relay, _ = pool.join("relay")
    for name in names:
        assert pool.validator.get(f"/v1/tasks/{name}").status_code == 200
        assert [client.get(f"/v1/tasks/{name}").status_code for client in (pool.worker, relay.client)] == [404, 404]
    assert pool.worker.get("/v1/config").status_code == pool.worker.get("/v1/ledger/0").status_code == 403


def test_work_from_prompts_alone_is_accepted_and_the_worker_never_receives_a_secret(
    pool: Pool, talkative_folder: Path
) -> None:
    worker, validator = pool.worker, pool.validator
    producer = Producer(worker.config, RUN, worker.node.identity, TorchEngine("float32"), worker.tasks)
    producer.load(talkative_folder, 0)
    with Judge(validator.config, RUN, "float32", validator.tasks) as judge:
        judge.load(talkative_folder)
        worker.node.policy_version = 0
        cases = [submitted(pool, producer, judge) for _ in range(3)]
    producer.close()
    turns = [row.turns for case in cases for row in case.rows if case.tasks[row.group].source == "own"]
    outcomes = {grade.outcome for case in cases for grade in case.grades}
    assert any(turns) and outcomes >= {"graded", "grader_error"}, "the test must cover tools, rewards and their errors"

    status = worker.get("/v1/status").json()
    assert status["grading"]["errors"] > 0 and worker.get("/v1/history").json()["samples"] == []
    for method, path in [*OPEN, *ALLOWED]:
        if method == "GET":
            worker.get(path.replace("{sha256}", worker.config.tasks.digest).replace("{after}", "0"))
    received = b"\n".join(worker.transport.received)
    assert SECRET.encode() not in received
    for task in validator.tasks.heldout:
        assert task.question.encode() not in received
    for task in validator.tasks.train:
        assert task.id.rpartition("/")[2].encode() not in received
    everything = b"\n".join(validator.transport.received)
    assert SECRET.encode() in everything, "the search must find what was sent"
    assert SECRET not in ANYONE.get(f"{worker.node.client.base_url}/v1/run").text


def submitted(pool: Pool, producer: Producer, judge: Judge) -> Case:
    """Produce a submission, upload it, and let the validator judge it. Return its case."""
    worker, validator = pool.worker.node, pool.validator.node
    given = worker.beat(wants_task=True).assignment
    assert given is not None, worker.answer
    data = producer.submission(given)
    worker.send_file(given.upload_path, data)
    [claim] = validator.post("/v1/claims", ClaimRequest(most=1), Claims).claims
    case = judge.open(claim.assignment, claim.worker, validator.fetch_file(given.upload_path, max_bytes=1 << 20))
    assert isinstance(case, Case)
    [examined] = judge.examine([case])
    assert examined.finding is None, examined.finding
    accepted = judge.accepted_file(examined.case, validator.identity)
    rows = read_accepted(accepted, max_rows=GROUPS * GROUP_SIZE, max_tokens=1_000).rows
    assert {row.task for row in rows} == {task.id for task in examined.case.tasks}
    stored = validator.put(f"/v1/accepted/{given.id}", accepted, Stored)
    groups = group_results(examined.case, judge.tokenizer)
    tokens, file = sum(group.tokens for group in groups), blake3(data).hexdigest()
    opinion = Opinion(run=validator.invite.run, submission=given.id, file=file, reason=None, tokens=tokens)
    validator.post("/v1/verdicts", Result(opinion, groups=groups).verdict(validator.identity, stored.hash), Ok)
    return examined.case
