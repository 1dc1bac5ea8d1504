"""The chat page's server: accounts, conversations as trees, and saved replies that can be recomputed."""

import json
from pathlib import Path

import httpx
import pytest

from shoal.cli import main
from shoal.files import copy_tree
from shoal.serve import proof

from .support import CHEAP, Running, User, serving, until


def test_a_user_can_register_log_out_and_log_in_again(page: Running) -> None:
    user = User(page, "grace")
    assert user.enter().json()["name"] == "grace"
    assert User(page, "GRACE").enter().status_code == 409
    assert user.post("logout").status_code == 200
    assert user.get("conversations").status_code == 401
    assert user.enter("login").status_code == 200
    assert user.get("me").json()["name"] == "grace"


def test_the_page_knows_whether_any_account_exists(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, hasher=CHEAP) as running:
        user = User(running, "grace")
        assert user.get("me").json()["first"] is True
        assert user.enter().status_code == 200
        assert "first" not in user.get("me").json(), "this field must be sent only to visitors without a session"
        assert User(running, "ada").get("me").json()["first"] is False


def test_a_conversation_is_streamed_saved_listed_and_deleted(ada: User) -> None:
    id = ada.begin()
    events = ada.say(id, "a question about whales")
    text = "".join(event["text"] for event in events if event["event"] == "text")
    assert events[-1]["event"] == "done" and events[-1]["message"]["content"] == text
    assert [message["role"] for message in ada.read(id)["messages"]] == ["user", "assistant"]
    assert (id, "a question about whales") in [(row["id"], row["title"]) for row in ada.get("conversations").json()]
    assert ada.delete(f"conversations/{id}").status_code == 200
    assert ada.get(f"conversations/{id}").status_code == 404


def test_regenerating_and_editing_add_branches_and_lose_nothing(ada: User) -> None:
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


def test_stopping_saves_the_text_so_far_with_its_proof(page: Running, ada: User) -> None:
    for _ in range(20):  # try again if the reply ends with its first token
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


def test_the_server_and_shoal_audit_verify_a_reply_and_refuse_a_changed_one(
    page: Running, ada: User, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    out = capsys.readouterr().out
    assert proof.EXACT in out or proof.CLOSE in out

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
        assert page.verify(reply | lie).sentence.startswith(proof.REFUSED), name
    path.write_text(json.dumps(reply | lies["seed"]))
    assert main(["audit", str(path), "--model", str(tiny_folder)]) == 1


def test_two_versions_reply_side_by_side_with_the_prompt_and_target_length_of_the_run(
    run_folder: Path, tmp_path: Path
) -> None:
    with serving(run_folder, tmp_path, hasher=CHEAP) as running:
        user = User.registered(running)
        models = user.get("models").json()
        assert [version["id"] for version in models["versions"]] == ["steps@3", "steps@0"]
        assert models["newest"] == "steps@3" and models["targets"] == [4, 8] and models["max_tokens"] == 32
        id = user.begin()
        events = user.say(id, "1 + 1", models=["steps", "steps@0"], target=8, as_trained=True)
        done = [event["message"] for event in events if event["event"] == "done"]
        first, second = (message["facts"] for message in done)
        assert (first["version"], second["version"]) == (3, 0)
        assert first["pair"] == second["pair"] and first["target"] == 8
        assert first["weights"] != second["weights"]
        at = f"conversations/{id}/messages/{done[1]['id']}"
        assert user.get(f"{at}/proof").json()["messages"] == [
            {"role": "system", "content": "short"},
            {"role": "user", "content": "1 + 1=\nThink for 8 tokens before giving the answer."},
        ]
        assert user.post(f"{at}/verify").json()["passed"]


def test_a_new_version_of_a_live_run_becomes_the_newest(
    run_folder: Path, tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "live"
    copy_tree(run_folder, run)
    with serving(run, tmp_path / "serve", hasher=CHEAP) as running, running.client() as client:
        assert client.get("/health").json()["model"] == "live@3"
        copy_tree(tiny_folders[0], run / "learner" / "versions" / "v000004")
        until(lambda: client.get("/health").json()["model"] == "live@4")


def test_an_open_server_needs_no_login_and_refuses_other_host_names(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, open=True, hasher=CHEAP) as running:
        user = User(running)
        user.csrf = user.get("me").json()["csrf"]
        assert user.say(user.begin())[-1]["event"] == "done"
        assert httpx.get(f"{running.url}/v1/models").status_code == 200, "an open server's API must need no key"
        rebound = httpx.get(f"{running.url}/chat/me", headers={"Host": "evil.example"})
        assert rebound.status_code == 421 and "Set-Cookie" not in rebound.headers


def test_registration_can_be_closed(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, registration=False, hasher=CHEAP) as running:
        assert User(running).enter().status_code == 403
