"""Decide by an allowlist whether a program prints the same on every machine, with every Python from 3.11 on.

Allowed are integers, text, lists, dicts, control flow, functions and a few builtins. Floats are allowed only in
programs without `sum`, `**` and sorting: the last digits of sums and powers depend on version and machine, and the
order of NaNs depends on the version. Anything that could show an address, a hash, the clock, the version, or the text
of an exception is excluded.
Invariant: a doubtful program is not plain. This runs in the sandbox, because a model's source can crash a parser. It
reads the program from standard input. If the program is plain, it writes `plain` to standard output.
"""

import ast
import sys
import warnings

CONSUMERS = {"list", "tuple", "sorted", "sum", "min", "max", "any", "all"}
LAZY = {"zip", "enumerate", "reversed"}  # their results print as an address
FUNCTIONS = CONSUMERS | LAZY | {"print", "range", "len", "abs", "divmod", "bin", "hex", "round"}
FUNCTIONS |= {"int", "float", "str", "bool", "dict"}
METHODS = {"append", "extend", "insert", "pop", "remove", "clear", "copy", "count", "index", "sort", "reverse"}
METHODS |= {"get", "items", "keys", "values", "update", "setdefault"}
METHODS |= {"join", "split", "strip", "lstrip", "rstrip", "replace", "startswith", "endswith", "find", "zfill"}
FORMAT = set("0123456789.,+-<>^= bdxXfg")
NODES: tuple[type[ast.AST], ...] = (
    *(ast.Module, ast.Expr, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Pass),
    *(ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Call, ast.keyword, ast.Starred, ast.Attribute, ast.Name),
    *(ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.IfExp, ast.BoolOp, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.boolop, ast.operator, ast.unaryop, ast.expr_context),
)


def plain(source: str) -> bool:
    """Return whether a program prints the same everywhere. Raise what the parser raises."""
    if any(not (" " <= character <= "~" or character in "\n\t") for character in source):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # later versions may refuse what this version warns about
        tree = ast.parse(source)
        compile(source, "program", "exec")
    nodes = list(ast.walk(tree))
    return all(isinstance(node, NODES) for node in nodes) and _names(nodes) and _values(nodes, source)


def _names(nodes: list[ast.AST]) -> bool:
    """Return whether functions are only called, other names are variables, and lazy results are only iterated."""
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    variables = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    variables |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = {id(call.func) for call in calls}
    iterated = {id(node.iter) for node in nodes if isinstance(node, ast.For | ast.comprehension)}
    for call in calls:
        if (name := _name(call)) in CONSUMERS and len(call.args) == 1 and not call.keywords:
            iterated.add(id(call.args[0]))
        if isinstance(call.func, ast.Attribute) and call.func.attr == "join" and len(call.args) == 1:
            iterated.add(id(call.args[0]))
        if name not in FUNCTIONS | defined and not isinstance(call.func, ast.Attribute):
            return False
        if name in LAZY and id(call) not in iterated:
            return False
    loaded = {name.id for name in names if not isinstance(name.ctx, ast.Store) and id(name) not in called}
    return (
        not (defined | variables) & FUNCTIONS
        and not defined & variables
        and loaded <= variables
        and all(id(node) in iterated for node in nodes if isinstance(node, ast.GeneratorExp))
        and all(
            id(node) in called and node.attr in METHODS  # a method as a value prints as an address
            for node in nodes
            if isinstance(node, ast.Attribute)
        )
    )


def _values(nodes: list[ast.AST], source: str) -> bool:
    """Return whether constants are of plain types, and arithmetic is exact or rounds identically everywhere."""
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts = [value for value in constants if isinstance(value, str)]
    powers = [node for node in nodes if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Pow)]
    exponents = [node.right if isinstance(node, ast.BinOp) else node.value for node in powers]
    called = {_name(node) for node in nodes if isinstance(node, ast.Call)}
    called |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    divided = any(isinstance(node, ast.Div) for node in nodes)
    floats = divided or "float" in called or any(isinstance(value, float) for value in constants)
    return (
        all(value is None or isinstance(value, int | float | str) for value in constants)
        and all(text.isascii() and "%" not in text for text in texts)  # %c could make other characters
        and all(isinstance(power, ast.Constant) and isinstance(power.value, int) for power in exponents)
        and not (floats and (powers or called & {"sum", "sorted", "sort"}))
        and _formats(nodes, source)
    )


def _formats(nodes: list[ast.AST], source: str) -> bool:
    """Return whether Python 3.11 can parse all f-strings, and whether their format specs are for numbers only."""
    specs = [node.format_spec for node in nodes if isinstance(node, ast.FormattedValue) and node.format_spec]
    parts = [part for spec in specs if isinstance(spec, ast.JoinedStr) for part in spec.values]
    strings = [node for node in nodes if isinstance(node, ast.JoinedStr) and node not in specs]
    return all(isinstance(part, ast.Constant) and set(str(part.value)) <= FORMAT for part in parts) and all(
        _simple(ast.get_source_segment(source, node) or "") for node in strings
    )


def _simple(text: str) -> bool:
    """Return whether an f-string is one line with quotes only at its ends, no escapes and no comments."""
    return not set(text) & set("\\#\n") and sum(map(text.count, "'\"")) == 2


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


if __name__ == "__main__":
    sys.stdout.write("plain\n" if plain(sys.stdin.buffer.read().decode()) else "")
