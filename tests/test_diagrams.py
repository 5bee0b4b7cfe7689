"""The drawings in img/: one visual language, readable in light and dark, each used and described somewhere."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PROJECT = Path(__file__).parents[1]
DRAWINGS = sorted((PROJECT / "img").glob("*.svg"))
MODEL = PROJECT / "img" / "cluster.svg"  # whose style the others repeat
SVG = "{http://www.w3.org/2000/svg}"
ENOUGH = 4.5  # WCAG 2's contrast for text
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\([^)]*?img/(?P<name>[\w-]+\.svg)\)")
IN_SLIDES = re.compile(r"\{image\} \S*?img/(?P<name>[\w-]+\.svg)\n:alt: (?P<alt>.*)")
TROUBLES = """([enough]) => {
    const light = colour => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(n => n / 255);
        const [r, g, b] = parts.map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const within = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
    const texts = [...document.querySelectorAll("text")].map(text => [text, text.getBoundingClientRect()]);
    const paper = document.querySelector(".paper").getBoundingClientRect(), found = [];
    texts.forEach(([text, box], i) => {
        const under = document.elementsFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2)
            .find(e => !["text", "tspan", "svg"].includes(e.tagName) && getComputedStyle(e).fill != "none");
        const say = trouble => found.push(`${JSON.stringify(text.textContent)} ${trouble}`);
        if (!under || !within(box, paper)) return say("leaves the paper");
        if (!within(box, under.getBoundingClientRect())) say("leaves its box");
        const [a, b] = [text, under].map(e => light(getComputedStyle(e).fill) + 0.05);
        if (Math.max(a / b, b / a) < enough) say(`has a contrast of ${Math.max(a / b, b / a).toFixed(1)}`);
        for (const [other, rect] of texts.slice(i + 1))
            if (!apart(box, rect)) say(`overlaps ${JSON.stringify(other.textContent)}`);
    });
    return found;
}"""

each = pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)


def root_of(path):
    return ElementTree.parse(path).getroot()


def style_of(path):
    return root_of(path).find(f"{SVG}style").text


def prose():
    """Yield the name and the text of all that may show a drawing: README, the docs, notebooks' markdown."""
    for path in [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]:
        yield path.name, path.read_text(encoding="utf-8")
    for path in (PROJECT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path.name, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@each
def test_a_drawing_has_a_title_a_label_and_a_size_that_fits_the_page(path):
    root = root_of(path)
    assert root.get("role") == "img"
    assert len(root.get("aria-label").split()) >= 4 and len(root.find(f"{SVG}title").text.split()) >= 4
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert root.get("width") == "760", "wider ones would shrink, and their text with them"


@each
def test_a_drawing_has_the_style_of_all_and_no_colours_or_sizes_of_its_own(path):
    assert style_of(path) == style_of(MODEL), f"copy the <style> of {MODEL.name}"
    known = set(re.findall(r"\.([a-z]+)", style_of(MODEL)))
    for element in root_of(path).iter():
        assert not set(element.attrib) & {"fill", "stroke", "stroke-width", "style", "font-size", "font-family"}
        assert set(element.get("class", "").split()) <= known


def test_no_text_is_smaller_than_12_pixels():
    sizes = [float(size) for size in re.findall(r"([\d.]+)px", style_of(MODEL))]
    assert len(sizes) >= 4 and min(sizes) >= 12


@each
def test_a_drawing_is_shown_and_described_somewhere(path):
    found = [(where, one) for where, text in prose() for how in (PICTURE, IN_SLIDES) for one in how.finditer(text)]
    shown = {where: one["alt"] for where, one in found if one["name"] == path.name}
    assert shown, f"no page shows img/{path.name}"
    assert all(len(alt.split()) >= 8 for alt in shown.values()), shown


def test_no_text_leaves_its_box_or_overlaps_or_is_pale_in_a_browser(browser):
    troubles, page = {}, browser.new_page(viewport={"width": 800, "height": 800})
    for path in DRAWINGS:
        page.goto(path.as_uri())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if found := page.evaluate(TROUBLES, [ENOUGH]):
                troubles[path.stem, scheme] = found
    assert not troubles, json.dumps([[*where, *what] for where, what in troubles.items()], indent=1)
