"""The drawings in img/ can be read, in light and in dark, and img/phone/ has each that the book shows, for a phone."""

import json
import re
from pathlib import Path

import pytest

DRAWINGS = sorted((Path(__file__).parents[1] / "img").rglob("*.svg"))
NARROW = [path for path in DRAWINGS if path.parent.name == "phone"]
ENOUGH = 4.5  # WCAG 2's contrast for text
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


def words_of(path):
    texts = re.findall(r"<text.*?</text>", path.read_text(encoding="utf-8"))
    return set(" ".join(re.sub("<[^>]+>", "", text) for text in texts).split())


@pytest.mark.parametrize("path", NARROW, ids=lambda path: path.stem)
def test_a_drawing_says_the_same_on_a_phone(path):
    assert words_of(path) == words_of(path.parents[1] / path.name)


@pytest.mark.weekly
def test_no_text_leaves_its_box_or_overlaps_or_is_pale_in_a_browser(browser):
    troubles, page = {}, browser.new_page(viewport={"width": 800, "height": 1300})
    for path in DRAWINGS:
        page.goto(path.as_uri())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if found := page.evaluate(TROUBLES, [ENOUGH]):
                troubles[path.parent.name, path.stem, scheme] = found
    assert NARROW and not troubles, json.dumps([[*where, *what] for where, what in troubles.items()], indent=1)
