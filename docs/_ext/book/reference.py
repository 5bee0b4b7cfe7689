"""Docstrings for the reference: Google style goes to napoleon, "name: meaning" becomes a field, `code` becomes code."""

import inspect
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

MADE_FOR_YOU = {"daskrun.Job", "daskrun.ScriptFailed", "daskrun.WorkerDied", "daskrun.protocol.Ended"}
SAID_ELSEWHERE = {"workshop_utils.train.Settings", "daskrun.run"}  # as attributes, and for `launch`
NAMES = re.compile(r"(?:^|(?<=[.;] ))((?:\w+, )*\w+): (?=\S)", re.MULTILINE)
# What is said of the whole, after the last name.
ENDS = re.compile(r"(?:^|(?<=[.] ))(?:Return|Raise|Warn|Yield|Log)s\b", re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))")
SECTIONS = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):\n ", re.MULTILINE)  # of Google style
GOOGLE = Config(napoleon_use_ivar=True)  # attributes are fields, and no entries of their own
# A name that the reference may have: `Job`, `load_resnet`, `Job.explain()`; but not `size`, which is an argument.
NAMED = re.compile(r"(?=[A-Z]|.*[_.(])[A-Za-z][\w.]*(?:\(\))?")


def as_fields(text: str, parameters: list[str]) -> str:
    """Return a docstring as reStructuredText, with its parameters as one list of fields, in their own order.

    >>> print(as_fields("Return a Client. t_s: seconds. n: how many.\\nRaises Lost.", ["n", "t_s"]))
    Return a Client.
    <BLANKLINE>
    :param n: how many.
    :param t_s: seconds.
    <BLANKLINE>
    Raises Lost.
    """
    meanings: dict[str, str] = {}
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.lstrip().startswith(">>>"):
            parts.append(paragraph)
            continue
        found = [name for name in NAMES.finditer(paragraph) if set(name[1].split(", ")) <= set(parameters)]
        if not found:
            parts.append(_with_code(paragraph, parameters))
            continue
        first = found[0].start()
        end = next((stop.start() for stop in ENDS.finditer(paragraph) if stop.start() > first), len(paragraph))
        found = [name for name in found if name.start() < end]
        stops = [name.start() for name in found[1:]] + [end]
        if not meanings:
            place = len(parts) + bool(paragraph[:first].strip())
        for name, stop in zip(found, stops, strict=True):
            meaning = _with_code(" ".join(paragraph[name.end() : stop].split()), parameters)
            meanings |= dict.fromkeys(name[1].split(", "), meaning)
        parts += [_with_code(rest.strip(), parameters) for rest in (paragraph[:first], paragraph[end:]) if rest.strip()]
    if meanings:
        parts.insert(place, "\n".join(f":param {name}: {meanings.get(name, '')}".rstrip() for name in parameters))
    return "\n\n".join(parts)


def in_google_style(text: str, parameters: list[str]) -> str:
    """Return a docstring in Google style as reStructuredText.

    >>> print(in_google_style("Wait for a `Job`.\\n\\nArgs:\\n    n: `n` of them.", ["n"]))
    Wait for a :py:obj:`Job <.Job>`.
    <BLANKLINE>
    :param n: ``n`` of them.
    <BLANKLINE>
    """
    parts = re.split(r"(\n\s*\n)", text)
    coded = "".join(part if part.lstrip().startswith(">>>") else _with_code(part, parameters) for part in parts)
    return str(GoogleDocstring(coded, GOOGLE))


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Rewrite one docstring's lines in place."""
    try:
        parameters = [name for name in inspect.signature(obj).parameters if name != "self"]  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a module, a constant, a property
        parameters = []
    text = "\n".join(lines)
    lines[:] = (in_google_style if SECTIONS.search(text) else as_fields)(text, parameters).split("\n")
    if what == "function" and (arguments := [name for name in parameters if "_" in name]):
        lines[:0] = [".. index::", *(f"   ! single: {argument}" for argument in arguments), ""]  # the search finds them


def no_signature(app: Sphinx, what: str, name: str, *_: object) -> tuple[str, None] | None:
    """Leave out the arguments of what others make for you."""
    return ("", None) if name in MADE_FOR_YOU else None


def no_fields(app: Sphinx, domain: str, what: str, content: nodes.Element) -> None:
    """Leave out the arguments again that Sphinx lists with their types; attributes stay."""
    names = {name for signature in content.parent.findall(addnodes.desc_signature) for name in signature["ids"]}
    if names & (MADE_FOR_YOU | SAID_ELSEWHERE):
        for fields in [node for node in content if isinstance(node, nodes.field_list)]:
            for field in list(fields):
                if not field[0].astext().startswith("ivar "):
                    fields.remove(field)
            if not fields:
                content.remove(fields)


def setup(app: Sphinx) -> None:
    """Have Sphinx call these for each docstring, each signature, each entry."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", no_signature)
    app.connect("object-description-transform", no_fields, priority=900)


def _with_code(text: str, parameters: list[str]) -> str:
    return CODE.sub(lambda found: _code(found[1], parameters) + (r"\ " if found[2] else ""), text)  # "`Breed`s": a gap


def _code(words: str, parameters: list[str]) -> str:
    if NAMED.fullmatch(words) and words not in parameters:  # a link, if the reference has it
        return f":py:obj:`{words} <.{words.removesuffix('()')}>`"
    return f"``{words}``"
