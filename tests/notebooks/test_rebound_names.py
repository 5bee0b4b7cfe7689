"""A name that a later cell reads keeps its kind: notebook 10 once took a script's output for settings of a host."""

import ast
import symtable

import pytest
from lessons import SOURCES, code_cells, read

# Names that another call binds again, to a value of the same kind, before a later cell reads them.
ALIKE = {
    "03": {"model", "logits"},  # a ResNet; (photos, categories) scores
    "06": {"job"},
}


def kind(value):
    """Return a word for what an expression makes: the type of a literal, or the function that is called."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func)
    if isinstance(value, ast.Constant):
        return type(value.value).__name__
    names = {ast.ListComp: "List", ast.DictComp: "Dict", ast.SetComp: "Set"}
    return names.get(type(value), type(value).__name__)


def statements(nodes):
    """Yield all statements outside of functions and classes."""
    for node in nodes:
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node
            yield from statements(ast.iter_child_nodes(node))


def bound(tree):
    """Yield (name, kind) for each assignment outside of functions; a solution takes the place of its stub."""
    for node in statements(tree.body):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            parts = getattr(target, "elts", None)
            values = getattr(node.value, "elts", None) if parts else [node.value]
            kinds = map(kind, values) if values else (f"{kind(node.value)}[{place}]" for place in range(len(parts)))
            for part, what in zip(parts or [target], kinds, strict=True):
                if isinstance(part, ast.Name) and what != "NoneType":
                    yield part.id, what


def read_by(source):
    """Return the names that a cell reads from other cells: those of functions, too, and none that it binds first."""
    names, tables = set(), [symtable.symtable(source, "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    first = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            place = (node.lineno, isinstance(node.ctx, ast.Store))
            first[node.id] = min(first.get(node.id, place), place)
    return {name for name in names if not first.get(name, (0, False))[1]}


def rebound(cells):
    """Return the names that a cell binds to another kind than an earlier one did, and a later one reads."""
    kinds, changed, found = {}, set(), set()
    for source in cells:
        found |= changed & read_by(source)
        before = dict(kinds)
        for name, what in bound(ast.parse(source)):
            (changed.add if before.get(name, what) != what else changed.discard)(name)
            kinds[name] = what
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_name_that_a_later_cell_reads_keeps_its_kind(path):
    cells = [cell.source for cell in code_cells(read(path)) if not cell.source.startswith("%")]
    assert rebound(cells) <= ALIKE.get(path.stem[:2], set())


def test_a_name_that_changes_its_kind_is_found():
    first, other = "lines = environment()", "lines = done.stdout.splitlines()"
    assert rebound([first, other, "start(lines)"]) == {"lines"}
    assert rebound([first, other, "def start():\n    return lines"]) == {"lines"}
    assert not rebound([first, other, "lines = environment()\nstart(lines)"])
    assert not rebound([first, other, "def start(lines):\n    return lines"])
    assert not rebound(["lines = None", "lines = environment()", "start(lines)"])
