"""The slides in Chromium: all fit, all have notes, and their numbers are those that the benchmarks recorded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs/slides"
# How far the lowest part of a slide reaches, and the rightmost one beyond its edge; its notes and pictures.
MEASURE = """() => {
    const slide = Reveal.getCurrentSlide(), edge = slide.getBoundingClientRect().right
    const boxes = [...slide.querySelectorAll('*')].map(e => e.getBoundingClientRect())
    const images = [...slide.querySelectorAll('img')]
    return {
        bottom: Math.max(...boxes.map(box => box.bottom)), beyond: Math.max(...boxes.map(box => box.right - edge)),
        notes: slide.querySelector('aside.notes')?.textContent ?? '', title: slide.querySelector('h1').textContent,
        broken: images.filter(image => !image.naturalWidth || !image.alt).map(image => image.src),
        cut: [...slide.querySelectorAll('pre, code')].some(code => code.scrollWidth > code.clientWidth + 1)}}"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "revealjs", SOURCE, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def shown(built, browser):
    """What each slide measures in a window of its own size, and what the browser's console said."""
    page, said, slides = browser.new_page(viewport={"width": 1280, "height": 720}), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
    page.goto((built / "index.html").as_uri())
    page.wait_for_function("Reveal.isReady()")
    for position in range(page.evaluate("Reveal.getTotalSlides()")):
        page.evaluate("position => Reveal.slide(position)", position)
        slides.append(page.evaluate(MEASURE))
    return slides, said


def test_there_are_fifteen_slides_or_fewer_and_each_has_notes_for_the_speaker(shown):
    slides, _ = shown
    assert 10 <= len(slides) <= 15
    assert [slide["title"] for slide in slides if len(slide["notes"].split()) < 15] == []


def test_no_slide_overflows_and_no_line_of_code_is_cut(shown):
    slides, _ = shown
    assert {slide["title"]: slide["bottom"] for slide in slides if slide["bottom"] > 700} == {}
    assert {slide["title"]: slide["beyond"] for slide in slides if slide["beyond"] > 1} == {}
    assert [slide["title"] for slide in slides if slide["cut"]] == []


def test_pictures_are_there_and_nothing_comes_from_the_network(shown):
    slides, said = shown
    assert said == []
    assert [slide["broken"] for slide in slides if slide["broken"]] == []


def test_the_pdf_has_a_page_for_each_slide(built, shown):
    slides, _ = shown
    pages = re.findall(rb"/Type\s*/Page\b", (built / "slides.pdf").read_bytes())
    assert len(pages) == len(slides)


def test_numbers_are_those_that_the_benchmarks_recorded(built):
    text = re.sub(r"<[^>]+>", " ", (built / "index.html").read_text(encoding="utf-8"))
    rates = json.loads((ROOT / "benchmarks/results/cpu2-inference.json").read_text())["images_per_s"]
    assert re.search(rf"on two Dask workers\s+{rates['classify']:.0f}\s", text)
    assert "{{" not in text


def test_no_number_is_typed_beside_those(built):
    tables = [line for line in (SOURCE / "index.md").read_text().splitlines() if line.startswith("|")]
    assert len(tables) > 8
    assert [line for line in tables if re.search(r"\d", re.sub(r"\{\{.*?\}\}|fp32|bf16", "", line))] == []
