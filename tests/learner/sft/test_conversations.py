"""Conversations are read from files and encoded as tokens. Only the assistant's tokens are trained on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shoal.errors import UserError
from shoal.learner.sft.conversations import ChatTemplate, Dialogue, Example, find, read
from shoal.learner.sft.tiny import _tiny_tokenizer
from shoal.model.load import eos_ids, load_tokenizer
from tests.conftest import TINY_TEMPLATE

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}], "id": 3},
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "harbour.jsonl"


def test_json_lines_and_parquet_give_the_same_conversations(tmp_path):
    """Parquet's nulls are dropped. A prompt with a completion is read as a conversation."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    rows = [{"messages": [{"role": "user", "content": "a"}, call], "tools": [{"name": "f"}]}, *ROWS]
    short = {"prompt": "a", "completion": "b"}
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, [*rows, short])) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines, columns = (list(read(str(tmp_path / name))) for name in ("a.jsonl", "a.parquet"))
    wanted = [row["messages"] for row in rows]
    assert [c.messages for c in columns] == wanted and [c.messages for c in lines] == [*wanted, wanted[1]]
    assert [c.tools for c in columns] == [c.tools for c in lines[:3]] == [[{"name": "f"}], None, None]
    assert [c.where for c in lines] == [f"{tmp_path}/a.jsonl, row {n}" for n in (1, 3, 5, 7)]
    assert [c.where for c in columns] == [f"{tmp_path}/a.parquet, row {n}" for n in (1, 2, 3)]
    assert len(list(read(str(EXAMPLE)))) == 40


def test_a_missing_file_or_unknown_suffix_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    for name, words in (("a.jsonl", "no file at"), ("a.csv", "ends in none of")):
        with pytest.raises(UserError, match=words):
            list(read(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "not an object"),
        ('{"text": "a"}', "needs `messages`"),
        ('{"prompt": "a"}', "needs `messages`"),
        ('{"messages": []}', "not a list of messages"),
        ('{"messages": "a"}', "not a list of messages"),
        ('{"messages": ["a"]}', "message 0: not an object"),
        ('{"messages": [{"role": "gpt", "content": "a"}]}', "message 0: `role` is 'gpt', not one of system"),
        ('{"messages": [{"role": "user"}]}', "message 0: `content` is not a string"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "message 0: `content` is not a string"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "f"}', "`tools` is not a list"),
    ],
)
def test_the_error_for_a_bad_row_names_file_and_row(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(UserError) as raised:
        list(read(str(path)))
    assert str(raised.value).startswith(f"{path}, row 2") and words in str(raised.value)


def test_training_files_or_files_that_match_a_pattern_are_fetched_from_the_hub(tmp_path, monkeypatch):
    fetched: list[list[str]] = []

    def fill_hub(*files: str) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        hub = SimpleNamespace(list_repo_files=lambda name, repo_type: list(files))
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)

    def download(name: str, repo_type: str, allow_patterns: list[str]) -> str:
        fetched.append(sorted(allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fill_hub("README.md", "data/train-1.parquet", "data/train-0.parquet", "data/test-0.parquet")
    assert [path.name for path in find("org/name")] == ["train-0.parquet", "train-1.parquet"]
    assert fetched == [["data/train-0.parquet", "data/train-1.parquet"]]
    fill_hub("all/train-0.parquet", "short/train-0.parquet")
    assert find("org/name:short/*.parquet") == [tmp_path / "short/train-0.parquet"]
    for name, words in (("", "org/name:PATTERN; it has all/train-0.parquet, short"), (":long/*", "that matches 'long")):
        with pytest.raises(UserError, match=words):
            find(f"org/name{name}")


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


def test_smollm2s_trained_spans_equal_a_mask_made_by_hand(bundled, bundled_tokenizer):
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


def test_turns_of_the_tiny_tokenizer_end_with_eos(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder)
    example = ChatTemplate(tokenizer, eos_ids(tiny_folder)).example(
        conversation(("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "bye"))
    )
    assert tokenizer.decode(example.tokens) == "<user>1+1<eos><assistant>2<eos><user>2+2<eos><assistant>4<eos>"
    assert trained_text(tokenizer, example) == ["2<eos>", "4<eos>"]
    assert tokenizer.decode(example.tree.prompt) == "<user>1+1<eos><assistant>"


def test_eos_is_added_after_the_last_turn_if_the_template_writes_no_end_tokens():
    tokenizer = _tiny_tokenizer()
    example = ChatTemplate(tokenizer, [2]).example(conversation(("user", "12 + 34="), ("assistant", "46")))
    assert tokenizer.decode(example.tokens) == "<bos>12 + 34=46<eos>"
    assert trained_text(tokenizer, example) == ["46<eos>"]


def test_generation_tags_in_a_template_mark_the_trained_text(tiny_folder):
    # This template shortens earlier answers, so the whole conversation does not begin with a prefix's tokens.
    forgets = (
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


def test_an_end_token_that_the_model_does_not_declare_is_collected(tiny_folder):
    # The special token <user> serves as the end of a turn.
    template = other_template(tiny_folder, "{% for m in messages %}{{ m['content'] }}<user>\n{% endfor %}")
    assert trained_text(template.tokenizer, template.example(conversation(("user", "a"), ("assistant", "b")))) == [
        "b<user>"
    ]
    assert template.ends == {template.tokenizer.convert_tokens_to_ids("<user>")}


ANSWERED = conversation(("user", "a"), ("assistant", "b"))


@pytest.mark.parametrize(
    ("turns", "template", "words"),
    [
        (conversation(("user", "a")), TINY_TEMPLATE, "^chat.jsonl:7: it has no assistant message"),
        (conversation(("assistant", "a")), TINY_TEMPLATE, "^chat.jsonl:7: it begins with an assistant message"),
        (ANSWERED, "{{ raise_exception('no') }}", "^chat.jsonl:7: the chat template rejects this conversation .no"),
        (ANSWERED, "", "no chat template"),
    ],
)
def test_the_error_for_an_untrainable_conversation_names_its_row(tiny_folder, turns, template, words):
    with pytest.raises(UserError, match=words):
        other_template(tiny_folder, template).example(turns)


def test_an_earlier_turn_without_an_end_token_is_refused():
    turns = conversation(("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4"))
    with pytest.raises(UserError, match=r"^chat.jsonl:7: the chat template writes no token that ends"):
        ChatTemplate(_tiny_tokenizer(), [2]).example(turns)
