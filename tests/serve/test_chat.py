"""The page's server: accounts, conversations as trees, replies that are saved and can be recomputed."""

import json
from pathlib import Path

import httpx
import pytest

from shoal.cli import main
from shoal.config import Config
from shoal.errors import UserError
from shoal.files import copy_tree
from shoal.serve import proof
from shoal.serve.versions import ModelSource

from .people import PASSWORD, Person
from .support import CHEAP, Running, serving, until


def test_register_log_out_log_in(page: Running) -> None:
    person = Person(page, "grace")
    assert person.enter().json()["name"] == "grace"
    assert Person(page, "GRACE").enter().status_code == 409
    assert person.post("logout").status_code == 200
    assert person.get("conversations").status_code == 401
    assert person.enter("login").status_code == 200
    assert person.get("me").json()["name"] == "grace"


def test_the_page_knows_whether_anybody_has_an_account(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, hasher=CHEAP) as running:
        person = Person(running, "grace")
        assert person.get("me").json()["first"] is True
        assert person.enter().status_code == 200
        assert "first" not in person.get("me").json(), "only who is not logged in is told"
        assert Person(running, "ada").get("me").json()["first"] is False


def test_a_conversation_is_streamed_saved_listed_and_deleted(ada: Person) -> None:
    id = ada.begin()
    events = ada.say(id, "a question about whales")
    text = "".join(event["text"] for event in events if event["event"] == "text")
    assert events[-1]["event"] == "done" and events[-1]["message"]["content"] == text
    assert [message["role"] for message in ada.read(id)["messages"]] == ["user", "assistant"]
    assert (id, "a question about whales") in [(one["id"], one["title"]) for one in ada.get("conversations").json()]
    response = ada.http.request(
        "DELETE", f"/chat/conversations/{id}", headers={"X-CSRF-Token": ada.csrf, "Content-Type": "application/json"}
    )
    assert response.status_code == 200
    assert ada.get(f"conversations/{id}").status_code == 404


def test_regenerating_and_editing_make_branches_and_lose_nothing(ada: Person) -> None:
    id = ada.begin()
    ada.say(id, "one")
    question, first = ada.read(id)["messages"]
    ada.say(id, None, parent=question["id"])
    ada.say(id, "two", parent=None)
    messages = ada.read(id)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant", "user", "assistant"]
    assert messages[2]["parent"] == messages[1]["parent"] == question["id"]
    assert messages[3]["parent"] is None and ada.read(id)["leaf"] == messages[4]["id"]
    assert ada.post(f"conversations/{id}", {"leaf": first["id"]}).status_code == 200
    assert ada.read(id)["leaf"] == first["id"]


def test_stopping_saves_what_was_written_and_its_proof(page: Running, ada: Person) -> None:
    for _ in range(20):  # a reply may end with its first token
        id = ada.begin()
        body = {"content": "go on", "models": [page.model], "max_tokens": 400, "temperature": 2}
        route, headers = f"/chat/conversations/{id}/replies", {"X-CSRF-Token": ada.csrf}
        with ada.http.stream("POST", route, json=body, headers=headers) as response:
            if any('"text"' in line for line in response.iter_lines()):
                break
    until(lambda: len(ada.read(id)["messages"]) == 2)
    reply = ada.read(id)["messages"][1]
    assert reply["facts"]["tokens"] >= 1
    verdict = ada.post(f"conversations/{id}/messages/{reply['id']}/verify").json()
    assert verdict["passed"], verdict


def test_a_reply_is_recomputed_here_and_elsewhere_and_a_changed_one_refused(
    page: Running, ada: Person, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    id = ada.begin()
    message = ada.say(id, max_tokens=40)[-1]["message"]
    assert message["proven"]
    verdict = ada.post(f"conversations/{id}/messages/{message['id']}/verify").json()
    assert verdict["passed"] and all(finding["passed"] for finding in verdict["findings"])

    file = ada.get(f"conversations/{id}/messages/{message['id']}/proof").text
    path = tmp_path / "reply.json"
    path.write_text(file)
    assert main(["audit", str(path), "--model", str(tiny_folder)]) == 0
    said = capsys.readouterr().out
    assert proof.EXACT in said or proof.CLOSE in said

    reply = json.loads(file)
    other = 5 if reply["tokens"][0] != 5 else 6
    lies = {
        "text": {"text": "something else"},
        "token": {"tokens": [other, *reply["tokens"][1:]]},
        "seed": {"seed": str(int(reply["seed"]) + 1)},
        "messages": {"messages": [{"role": "user", "content": "two"}]},
        "weights": {"weights": "0" * 64},
        "proof": {"proofs": [reply["proofs"][0][:-8] + "AAAAAAAA", *reply["proofs"][1:]]},
    }
    for name, lie in lies.items():
        answer = ada.post("verify", reply | lie)
        assert answer.status_code == 400 or answer.json()["sentence"] == proof.REFUSED, name
    path.write_text(json.dumps(reply | lies["seed"]))
    assert main(["audit", str(path), "--model", str(tiny_folder)]) == 1


def test_two_versions_answer_side_by_side_with_the_runs_prompt_and_budget(run_folder: Path, tmp_path: Path) -> None:
    with serving(run_folder, tmp_path, hasher=CHEAP) as running:
        person = Person(running)
        person.enter()
        models = person.get("models").json()
        assert [one["id"] for one in models["versions"]] == ["steps@3", "steps@0"]
        assert models["newest"] == "steps@3" and models["targets"] == [4, 8] and models["max_tokens"] == 32
        id = person.begin()
        asked = {"models": ["steps", "steps@0"], "target": 8, "as_trained": True}
        done = [event for event in person.say(id, "1 + 1", **asked) if event["event"] == "done"]
        facts = [event["message"]["facts"] for event in done]
        assert [one["version"] for one in facts] == [3, 0]
        assert facts[0]["pair"] == facts[1]["pair"] and facts[0]["target"] == 8
        assert facts[0]["weights"] != facts[1]["weights"]
        message = done[1]["message"]["id"]
        file = person.get(f"conversations/{id}/messages/{message}/proof").json()
        asked_for = "Think for 8 tokens before giving the answer."
        assert file["messages"] == [
            {"role": "system", "content": "short"},
            {"role": "user", "content": f"1 + 1=\n{asked_for}"},
        ]
        assert person.post(f"conversations/{id}/messages/{message}/verify").json()["passed"]


def test_a_live_runs_new_version_is_taken_between_requests(
    run_folder: Path, tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "live"
    copy_tree(run_folder, run)
    with serving(run, tmp_path / "serve", hasher=CHEAP) as running, running.client() as client:
        assert client.get("/health").json()["model"] == "live@3"
        copy_tree(tiny_folders[0], run / "learner" / "versions" / "v000004")
        until(lambda: client.get("/health").json()["model"] == "live@4")


def test_an_open_server_needs_no_login_but_its_own_name(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, open=True, hasher=CHEAP) as running:
        person = Person(running)
        person.csrf = person.get("me").json()["csrf"]
        assert person.say(person.begin())[-1]["event"] == "done"
        assert httpx.get(f"{running.url}/v1/models").status_code == 200  # no key
        rebound = httpx.get(f"{running.url}/chat/me", headers={"Host": "evil.example"})
        assert rebound.status_code == 421 and "Set-Cookie" not in rebound.headers


def test_registration_can_be_closed(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, registration=False, hasher=CHEAP) as running:
        assert Person(running).enter().status_code == 403


def test_deleting_the_account_deletes_everything(page: Running) -> None:
    person = Person(page, "brief")
    person.enter()
    person.say(person.begin(), "forget me")
    assert person.post("delete-account", {"name": "brief", "password": "wrong password"}).status_code == 401
    assert person.post("delete-account", {"name": "brief", "password": PASSWORD}).status_code == 200
    assert person.get("conversations").status_code == 401
    assert person.enter("login").status_code == 401


def test_a_source_names_what_it_offers(run_folder: Path) -> None:
    from shoal.serve.versions import source_of

    source = source_of(str(run_folder))
    assert isinstance(source, ModelSource) and isinstance(source.config, Config)
    assert [offer.version for offer in source.offers()] == [3, 0]
    fetched = source_of(str(run_folder / "learner" / "versions"))
    assert [offer.id for offer in fetched.offers()] == ["versions@3"]
    with pytest.raises(UserError, match="neither a run"):
        source_of(str(run_folder / "learner"))
