"""Which tokens of a conversation are trained: exactly what the assistant wrote and the token that ends its turn."""

from pathlib import Path
from typing import Any

import pytest

from shoal.learner.sft.chat import ChatTemplate, Example
from shoal.learner.sft.conversations import Conversation, ConversationError
from shoal.learner.sft.tiny import _tiny_tokenizer
from shoal.model.load import eos_ids, load_tokenizer

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo, sailor!"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Row."},
]


def trained_text(tokenizer: Any, example: Example) -> list[str]:
    return [tokenizer.decode(example.tokens[start:stop]) for start, stop in example.spans]


def conversation(*messages: tuple[str, str]) -> Conversation:
    return Conversation("chat.jsonl:7", [{"role": role, "content": content} for role, content in messages])


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
    example = ChatTemplate(bundled_tokenizer, eos_ids(bundled)).example(Conversation("here", TWO_TURNS))
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
    with pytest.raises(ConversationError, match=r"^chat.jsonl:7: the chat template writes no token that ends"):
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
    with pytest.raises(ConversationError, match="chat.jsonl:7: the chat template changes message 1 or earlier ones"):
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
    with pytest.raises(ConversationError, match=f"^chat.jsonl:7: {words}"):
        template.example(conversation(*turns))


def test_what_the_template_itself_refuses_names_the_conversation(tiny_folder: Path) -> None:
    template = other_template(tiny_folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConversationError, match="chat.jsonl:7: the chat template rejects it .roles must alternate"):
        template.example(conversation(("user", "a"), ("assistant", "b")))


def test_a_tokenizer_without_a_template_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConversationError, match="no chat template"):
        other_template(tiny_folder, "")
