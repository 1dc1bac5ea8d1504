"""Conversations from files, as rows or errors that name their line; as tokens, of which the assistant's are trained."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shoal.errors import UserError
from shoal.learner.sft.conversations import ChatTemplate, Dialogue, Example, find, read
from shoal.learner.sft.tiny import _tiny_tokenizer
from shoal.model.load import eos_ids, load_tokenizer

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}], "id": 3},
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "harbour.jsonl"


def test_json_lines_and_parquet_hold_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines, rows = list(read(str(tmp_path / "a.jsonl"))), list(read(str(tmp_path / "a.parquet")))
    assert [c.messages for c in lines] == [c.messages for c in rows] == [row["messages"] for row in ROWS]
    assert [c.where for c in lines] == [f"{tmp_path}/a.jsonl, row 1", f"{tmp_path}/a.jsonl, row 3"]
    assert [c.where for c in rows] == [f"{tmp_path}/a.parquet, row 1", f"{tmp_path}/a.parquet, row 2"]


def test_a_prompt_and_its_completion_are_a_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert [c.messages for c in read(str(tmp_path / "a.jsonl"))] == [ROWS[0]["messages"]]


def test_columns_that_parquet_fills_in_are_left_out(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    rows = [{"messages": [{"role": "user", "content": "a"}, call], "tools": [{"name": "f"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    [found] = read(str(tmp_path / "a.parquet"))
    assert found.messages == [{"role": "user", "content": "a"}, call]
    assert found.tools == [{"name": "f"}]


def test_the_example_can_be_read() -> None:
    assert len(list(read(str(EXAMPLE)))) == 40


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "not an object"),
        ('{"text": "a"}', "needs `messages`"),
        ('{"prompt": "a"}', "needs `messages`"),
        ('{"messages": []}', "not a list of messages"),
        ('{"messages": "a"}', "not a list of messages"),
        ('{"messages": ["a"]}', "message 0: it is not an object"),
        ('{"messages": [{"role": "gpt", "content": "a"}]}', "message 0: `role` is 'gpt', not one of system"),
        ('{"messages": [{"role": "user"}]}', "message 0: `content` is not a string"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "message 0: `content` is not a string"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "f"}', "`tools` is not a list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(UserError) as raised:
        list(read(str(path)))
    assert str(raised.value).startswith(f"{path}, row 2") and words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", None, "no file at"),
        ("a.csv", b"a,b", "ends in none of"),
        ("a.parquet", b"PAR1", "not readable as Parquet"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, data: bytes | None, words: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words):
        list(read(str(tmp_path / name)))


def test_parquet_without_a_known_column_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: needs `messages`"):
        list(read(str(tmp_path / "a.parquet")))


class Hub:
    """A hub with one data set, whose files lie in a folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files, self.asked = folder, files, [""]
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()

    def list_repo_files(self, name: str, repo_type: str) -> list[str]:
        return self.files

    def snapshot_download(self, name: str, repo_type: str, allow_patterns: list[str]) -> str:
        self.asked = allow_patterns
        return str(self.folder)


@pytest.fixture
def make_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*files: str) -> Hub:
        hub = Hub(tmp_path, list(files))
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
        monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
        return hub

    return make


def test_of_a_hub_data_set_the_training_files_are_fetched(make_hub: Any) -> None:
    hub = make_hub("README.md", "data/train-1.parquet", "data/train-0.parquet", "data/test-0.parquet")
    assert [path.name for path in find("org/name")] == ["train-0.parquet", "train-1.parquet"]
    assert sorted(hub.asked) == ["data/train-0.parquet", "data/train-1.parquet"]


def test_a_pattern_chooses_among_several_sets(make_hub: Any) -> None:
    hub = make_hub("all/train-0.parquet", "short/train-0.parquet")
    with pytest.raises(UserError, match="org/name:PATTERN; it has all/train-0.parquet, short"):
        find("org/name")
    assert find("org/name:short/*.parquet") == [hub.folder / "short/train-0.parquet"]
    with pytest.raises(UserError, match="that matches 'long"):
        find("org/name:long/*")


def test_a_hub_that_cannot_be_reached_is_an_error(make_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    make_hub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UserError, match="'org/name' could not be fetched .* .no route."):
        find("org/name:*.jsonl")


TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo, sailor!"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Row."},
]


def trained_text(tokenizer: Any, example: Example) -> list[str]:
    return [tokenizer.decode(example.tokens[start:stop]) for start, stop in example.spans]


def conversation(*messages: tuple[str, str]) -> Dialogue:
    return Dialogue("chat.jsonl:7", [{"role": role, "content": content} for role, content in messages])


def other_template(folder: Path, template: str) -> ChatTemplate:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, eos_ids(folder))


def test_smollm2s_mask_equals_one_made_by_hand(bundled: Path, bundled_tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return list(bundled_tokenizer(text, add_special_tokens=False)["input_ids"])

    by_hand = [
        (
            ids("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
            False,
        ),
        (ids("Yo, sailor!<|im_end|>"), True),
        (ids("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"), False),
        (ids("Row.<|im_end|>"), True),
    ]
    example = ChatTemplate(bundled_tokenizer, eos_ids(bundled)).example(Dialogue("here", TWO_TURNS))
    assert list(example.tokens) == [token for tokens, _ in by_hand for token in tokens]
    trained = [trained for tokens, trained in by_hand for _ in tokens]
    prompt = len(example.tree.prompt)
    assert example.trained_N().tolist() == trained[prompt:] and not any(trained[:prompt])
    assert example.n_trained == sum(trained)


def test_the_tiny_tokenizers_turns_end_with_eos(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    example = ChatTemplate(tokenizer, eos_ids(tiny_folder)).example(
        conversation(("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "bye"))
    )
    assert tokenizer.decode(example.tokens) == "<user>1+1<eos><assistant>2<eos><user>2+2<eos><assistant>4<eos>"
    assert trained_text(tokenizer, example) == ["2<eos>", "4<eos>"]
    assert tokenizer.decode(example.tree.prompt) == "<user>1+1<eos><assistant>"


def test_where_a_template_ends_no_turn_eos_is_set_behind_the_last() -> None:
    tokenizer = _tiny_tokenizer()
    example = ChatTemplate(tokenizer, [2]).example(conversation(("user", "12 + 34="), ("assistant", "46")))
    assert tokenizer.decode(example.tokens) == "<bos>12 + 34=46<eos>"
    assert trained_text(tokenizer, example) == ["46<eos>"]


def test_a_turn_in_the_middle_that_nothing_ends_is_refused() -> None:
    turns = conversation(("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4"))
    with pytest.raises(UserError, match=r"^chat.jsonl:7: the chat template writes no token that ends"):
        ChatTemplate(_tiny_tokenizer(), [2]).example(turns)


def test_the_marks_of_a_template_are_used(tiny_folder: Path) -> None:
    forgets = (  # earlier answers are shortened, so a conversation's beginning does not begin it
        "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] if loop.last else m['content'][-1:] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = conversation(("user", "a"), ("assistant", "think 2"), ("user", "b"), ("assistant", "think 4"))
    template = other_template(tiny_folder, forgets)
    assert trained_text(template.tokenizer, template.example(turns)) == ["2<eos>", "think 4<eos>"]

    unmarked = forgets.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(UserError, match="chat.jsonl:7: the chat template changes message 1 or earlier ones"):
        other_template(tiny_folder, unmarked).example(turns)


def test_an_end_that_the_model_does_not_declare_is_collected(tiny_folder: Path) -> None:
    template = other_template(
        tiny_folder, "{% for m in messages %}{{ m['content'] }}<user>\n{% endfor %}"
    )  # <user>, a special token, stands in for an end of turn
    assert trained_text(template.tokenizer, template.example(conversation(("user", "a"), ("assistant", "b")))) == [
        "b<user>"
    ]
    assert template.ends == {template.tokenizer.convert_tokens_to_ids("<user>")}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([("user", "a")], "it has no assistant message"),
        ([("assistant", "a")], "it begins with an assistant message"),
    ],
)
def test_a_conversation_without_an_answer_is_refused(tiny_folder: Path, turns: list[Any], words: str) -> None:
    template = ChatTemplate(load_tokenizer(tiny_folder), eos_ids(tiny_folder))
    with pytest.raises(UserError, match=f"^chat.jsonl:7: {words}"):
        template.example(conversation(*turns))


def test_what_the_template_itself_refuses_names_the_conversation(tiny_folder: Path) -> None:
    template = other_template(tiny_folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="chat.jsonl:7: the chat template rejects it .roles must alternate"):
        template.example(conversation(("user", "a"), ("assistant", "b")))


def test_a_tokenizer_without_a_template_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        other_template(tiny_folder, "")
