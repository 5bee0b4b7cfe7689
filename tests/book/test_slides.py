"""The slides in Chromium: all fit, can be read from the last row, have notes, need no network and print."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.weekly

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs/slides"
ADDRESS = "https://github.com/someone/workshop"
SIZE = {"width": 1280, "height": 720}
READABLE = 20  # pixels of a slide of SIZE
# How far a slide's contents reach down and beyond its edge, its smallest text, its notes and pictures.
MEASURE = """() => {
    const slide = Reveal.getCurrentSlide(), edge = slide.getBoundingClientRect().right, scale = Reveal.getScale()
    const of = root => document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
    const texts = [], images = [...slide.querySelectorAll('img')]
    for (const root of [slide, document.querySelector('.slide-number')])
        for (const walker = of(root); walker.nextNode();) {
            const range = document.createRange()
            range.selectNodeContents(walker.currentNode)
            const box = range.getBoundingClientRect()
            const size = parseFloat(getComputedStyle(walker.currentNode.parentElement).fontSize) * scale
            if (box.width && walker.currentNode.textContent.trim()) texts.push({box, size, said: range.toString()})
        }
    const boxes = [...texts.slice(0, -1), ...images.map(image => ({box: image.getBoundingClientRect()}))]
    return {
        title: slide.querySelector('h1').textContent, notes: slide.querySelector('aside.notes')?.textContent ?? '',
        bottom: Math.max(...boxes.map(({box}) => box.bottom)),
        beyond: Math.max(...[...slide.querySelectorAll('*')].map(e => e.getBoundingClientRect().right - edge)),
        small: texts.filter(({size}) => size < READABLE).map(({size, said}) => `${size} px: ${said}`),
        broken: images.filter(image => !image.naturalWidth || !image.alt).map(image => image.src),
        cut: [...slide.querySelectorAll('pre, code')].some(code => code.scrollWidth > code.clientWidth + 1)}}
""".replace("READABLE", str(READABLE))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "revealjs", SOURCE, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"WORKSHOP_REPOSITORY": ADDRESS})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def shown(built, browser):
    """What each slide measures, its picture on a light and a dark system, and what was said or fetched."""
    pages, said, slides = {}, [], []
    asked: list[Any] = []
    for scheme in ("light", "dark"):
        page = pages[scheme] = browser.new_page(viewport=SIZE, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request))
        page.goto((built / "index.html").as_uri())
        page.wait_for_function("Reveal.isReady()")
        page.add_style_tag(content=".progress, .controls { display: none !important }")  # they move
        page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    for position in range(page.evaluate("Reveal.getTotalSlides()")):
        slide: dict[str, Any] = {}
        for scheme, page in pages.items():
            page.evaluate("position => Reveal.slide(position)", position)
            slide |= page.evaluate(MEASURE) | {scheme: page.screenshot()}
        slides.append(slide)
    return slides, said + [request.url for request in asked if not request.url.startswith(("file:", "data:"))]


def test_no_slide_overflows_is_half_empty_cuts_code_or_lacks_notes(shown):
    slides, _ = shown
    assert {slide["title"]: slide["bottom"] for slide in slides if not 540 < slide["bottom"] < 705} == {}
    assert {slide["title"]: slide["beyond"] for slide in slides if slide["beyond"] > 1} == {}
    assert [slide["title"] for slide in slides if slide["cut"]] == []
    assert [slide["title"] for slide in slides if len(slide["notes"].split()) < 15] == []


def test_all_text_can_be_read_from_the_last_row(shown):
    slides, _ = shown
    assert [slide["small"] for slide in slides if slide["small"]] == []


def test_slides_look_the_same_on_a_dark_system_and_need_no_network(shown):
    slides, said = shown
    assert [slide["title"] for slide in slides if slide["light"] != slide["dark"]] == []
    assert said == []
    assert [slide["broken"] for slide in slides if slide["broken"]] == []


def test_the_pdf_has_a_page_for_each_slide_and_the_last_says_where_the_workshop_is(built, shown):
    slides, _ = shown
    assert len(re.findall(rb"/Type\s*/Page\b", (built / "slides.pdf").read_bytes())) == len(slides)
    assert f'href="{ADDRESS}"' in (built / "index.html").read_text(encoding="utf-8")
