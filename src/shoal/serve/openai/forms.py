"""How models write calls of tools: a table of notations, and how the calls of each are read.

    JSON       {"name": ..., "arguments": {...}}, one or a list; or a name, then the arguments as JSON
    tags       a name, then each argument between tags of its own
    python     name(key=value, ...), one or a list
    gemma      name{key:<|"|>value<|"|>, ...}

Invariant: what is read is a whole call or nothing; no text of a model runs as code.
Left out: positional arguments.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LONGEST = 100_000  # characters of a call that is not JSON
Given = tuple[str, dict[str, Any]]  # a name and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # of the offered functions' parameters, by name

NAMED = r"(?P<name>[\w.-]+)"
FUNCTION = r"\s*<function=(?P<name>[^>\s]+)>"
PARAMETER = r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"
INVOKED = r'\s*<{0}parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</{0}parameter>'
INVOKE_HEAD = r'\s*"(?P<name>[^"]+)">'


@dataclass(frozen=True)
class Form:
    """How a call is written: `before`, the call, `after`. Spaces around it do not count; the reply's end ends it, too."""

    before: str  # "": calls stand only at a reply's beginning
    after: str
    name: str = "name"  # keys of a JSON object that holds both
    arguments: str = "arguments"
    kind: Literal["json", "tags", "python", "gemma"] = "json"
    head: str = ""  # a pattern: what stands before the arguments, with the name
    pair: str = ""  # a pattern: one argument between tags
    tail: str = ""  # behind the last of them
    dropped: tuple[str, ...] = ()  # what stands around calls or between them, and is no text
    shown: frozenset[int] = frozenset()  # control tokens that the marks are made of


# Read from the top: the first row that reads what the template writes is the template's.
FORMS = (
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    Form("<tool_call>", "</tool_call>", kind="tags", head=FUNCTION, pair=PARAMETER, tail="</function>"),
    # Seed-OSS
    Form("<seed:tool_call>", "</seed:tool_call>", kind="tags", head=FUNCTION, pair=PARAMETER, tail="</function>"),
    # GLM-4.5 and later
    Form(
        "<tool_call>",
        "</tool_call>",
        kind="tags",
        head=r"\s*" + NAMED,
        pair=r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    # gpt-oss (Harmony)
    Form(
        "to=functions.",
        "<|call|>",
        head=NAMED + r"[^{]*<\|message\|>\s*",
        dropped=(
            "<|channel|>analysis<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>commentary ",
            "<|start|>assistant",
            "<|end|>",
        ),
    ),
    # Gemma 4, FunctionGemma
    Form("<|tool_call>call:", "<tool_call|>", kind="gemma"),
    Form("<start_function_call>call:", "<end_function_call>", kind="gemma"),
    # Mistral: with a JSON list of both, the form is read from the template
    Form("[TOOL_CALLS]", "", head=r"\s*" + NAMED + r"\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*"),
    # DeepSeek V3 and R1, then V3.1, then V3.2
    Form(
        "<｜tool▁call▁begin｜>",
        "```<｜tool▁call▁end｜>",
        head=r"function<｜tool▁sep｜>" + NAMED + r"\s*```json\s*",
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Form(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        head=NAMED + r"<｜tool▁sep｜>\s*",
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Form(
        "<｜DSML｜invoke name=",
        "</｜DSML｜invoke>",
        kind="tags",
        head=INVOKE_HEAD,
        pair=INVOKED.format("｜DSML｜"),
        dropped=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    # MiniMax M2
    Form(
        "<invoke name=",
        "</invoke>",
        kind="tags",
        head=INVOKE_HEAD,
        pair=INVOKED.format(""),
        dropped=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # Kimi K2
    Form(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        head=r"\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    # Llama 3.1, as some templates have it
    Form("<function=", "</function>", head=NAMED + r">\s*"),
    # Gemma 3, LFM2, OLMo 3; Llama 3.2 and 4
    Form("```tool_code", "```", kind="python"),
    Form("<|tool_call_start|>", "<|tool_call_end|>", kind="python"),
    Form("<function_calls>", "</function_calls>", kind="python"),
    Form("", "", kind="python"),
    # Phi-4-mini and Granite 3, whose templates show no call
    Form("<|tool_call|>", "<|/tool_call|>"),
)


def read(form: Form, text: str, schemas: Schemas) -> list[Given] | None:
    """The calls that stand between `before` and `after`, of any form but JSON; None if there is anything else."""
    if len(text) > LONGEST:
        return None
    try:
        if form.kind == "python":
            return [_python(node) for node in _nodes(ast.parse(text.strip()).body)] or None
        return [_tags(form, text, schemas) if form.kind == "tags" else _gemma(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # of ast.parse, too
        return None


def _tags(form: Form, text: str, schemas: Schemas) -> Given:
    """Raises ValueError."""
    head = re.match(form.head, text)
    if not head:
        raise ValueError("no name")
    schema, found, at = schemas.get(head["name"], {}), {}, head.end()
    while pair := re.compile(form.pair, re.DOTALL).match(text, at):
        key, at = pair["key"].strip(), pair.end()
        found[key] = _typed(pair["value"], _of(_of(schema, "properties"), key))
    if text[at:].strip() not in ("", form.tail):
        raise ValueError("something else behind the last argument")
    return head["name"], found


def _of(value: Any, key: str) -> Any:
    return value.get(key, {}) if isinstance(value, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """A value between tags, which have no quotes: whether it is text, the schema says."""
    kinds = _kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return decoded(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; it is the client's, and may be anything."""
    alternatives = [schema, *_listed(_of(schema, "anyOf")), *_listed(_of(schema, "oneOf"))]
    kinds = [kind for one in alternatives for kind in _listed(_of(one, "type"))]
    return {kind for kind in kinds if isinstance(kind, str)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _nodes(body: Iterable[ast.stmt]) -> Iterable[ast.expr]:
    for statement in body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not a call")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _python(node: ast.expr) -> Given:
    """Raises ValueError."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with named arguments")
    found = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no name of an argument")
        found[keyword.arg] = ast.literal_eval(_Words().visit(keyword.value))
    return ast.unparse(node.func), found


class _Words(ast.NodeTransformer):
    """Words of JSON, and text without quotes, which some templates write."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        words = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words.get(node.id, node.id)), node)


def _gemma(text: str) -> Given:
    """Raises ValueError."""
    name, brace, rest = text.partition("{")
    if not re.fullmatch(r"\s*[\w.-]+\s*", name):
        raise ValueError("no name")
    quoted = re.sub(
        r'(<\|"\|>|<escape>)(?P<text>.*?)\1|(?<![\w.$-])(?P<key>[\w.$-]++)(?=\s*:)',
        lambda match: json.dumps(match["key"] if match["text"] is None else match["text"]),
        brace + rest,
        flags=re.DOTALL,
    )
    found = decoded(quoted)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return name.strip(), found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def decoded(text: str) -> Any:
    """The JSON value that the text is. Raises ValueError."""
    try:
        return DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("too deep") from error
