"""Files and functions of the package are short, and its public functions have types."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "workshop_utils"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text):
    """Return the numbers of the lines that hold code: neither blank, nor a comment alone, nor part of a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(getattr(node, "body", None), list) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= set(range(first.lineno, first.end_lineno + 1))
    return lines


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_at_most_250_lines_of_code_and_a_function_40(name):
    lines = code_lines(FILES[name])
    assert len(lines) <= 250
    for node in ast.walk(ast.parse(FILES[name])):
        if isinstance(node, FUNCTION):
            n_lines = len(lines.intersection(range(node.lineno, node.end_lineno + 1)))
            assert n_lines <= 40, f"{node.name} has {n_lines}"


def public_functions(text):
    """Yield the functions without a leading underscore at the top of a module and in its public classes."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [part for part in node.body if isinstance(part, FUNCTION)]
            yield from ((f"{node.name}.{part.name}", part) for part in methods if is_public(part.name))
        elif isinstance(node, FUNCTION) and is_public(node.name):
            yield node.name, node


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__getitem__", "__getitems__", "__len__", "__call__")


def untyped(function):
    """Return which of a function's parameters, or "return", have no type."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    missing = [one.arg for one in named if one.annotation is None and one.arg not in ("self", "cls")]
    # mypy's own rule: with typed parameters, __init__ need not say that it returns None.
    return missing + ["return"] * (function.returns is None and function.name != "__init__")


@pytest.mark.parametrize("name", FILES)
def test_every_public_function_says_its_types(name):
    found = {function: untyped(node) for function, node in public_functions(FILES[name])}
    assert not {function: missing for function, missing in found.items() if missing}


@pytest.mark.parametrize("name", FILES)
def test_nothing_empties_the_table_of_modules(name):
    # patch.dict does, for a moment. What another thread imports then is made anew, and a second `io` breaks torch.load.
    assert "patch.dict(sys.modules" not in FILES[name] and "sys.modules.clear" not in FILES[name]
