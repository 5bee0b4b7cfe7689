"""Each message of the workshop that the instructor's page explains is one that the workshop says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OURS = re.compile(r"^### `([^`]+)` *$", re.MULTILINE)  # another library's are followed by its name


def strings(path):
    """Return all strings of a Python file, pieces that lie beside each other joined, with … for what is put in."""
    return [text for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if (text := as_text(node))]


def as_text(node):
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(part) or "…" for part in node.values)
    return None


def test_the_workshop_says_the_messages_that_the_page_explains():
    modules = [path for folder in ("workshop_utils", "daskrun/src") for path in (ROOT / folder).rglob("*.py")]
    said = [text for path in modules for text in strings(path)]
    said += [
        (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "tools/why_broken.sh", "tools/install.sh")
    ]
    patterns = {one: re.compile(".*?".join(map(re.escape, one.split("…"))), re.DOTALL) for one in OURS.findall(PAGE)}
    assert patterns and [one for one, how in patterns.items() if not any(map(how.search, said))] == []
