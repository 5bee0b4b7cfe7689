"""The slides in Chromium: all fit and can be read from the last row, have notes, and print what was measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
        drawings: images.filter(image => image.src.endsWith('.svg'))
            .map(image => [image.src, image.getBoundingClientRect().width / image.naturalWidth]),
        cut: [...slide.querySelectorAll('pre, code')].some(code => code.scrollWidth > code.clientWidth + 1)}}
""".replace("READABLE", str(READABLE))
SMALLEST = (
    "Math.min(...[...document.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize)))"
)


def build(folder, address="", **settings):
    """Build the slides for a repository of that address into `folder`, and return their HTML."""
    unset = ("GITHUB_REPOSITORY", "WORKSHOP_REPOSITORY")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "revealjs", SOURCE, folder]
    environment["WORKSHOP_REPOSITORY"] = address
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return (folder / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    build(folder, ADDRESS)
    return folder


@pytest.fixture(scope="module")
def text(built):
    """What the slides and their notes say, in one line."""
    return words((built / "index.html").read_text(encoding="utf-8"))


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


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_there_are_fifteen_to_twenty_slides_and_each_has_notes_for_the_speaker(shown):
    slides, _ = shown
    assert 15 <= len(slides) <= 20
    assert [slide["title"] for slide in slides if len(slide["notes"].split()) < 15] == []


def test_no_slide_overflows_or_is_half_empty_and_no_line_of_code_is_cut(shown):
    slides, _ = shown
    assert {slide["title"]: slide["bottom"] for slide in slides if not 540 < slide["bottom"] < 705} == {}
    assert {slide["title"]: slide["beyond"] for slide in slides if slide["beyond"] > 1} == {}
    assert [slide["title"] for slide in slides if slide["cut"]] == []


def test_all_text_can_be_read_from_the_last_row_also_in_drawings(shown, browser):
    slides, _ = shown
    assert [slide["small"] for slide in slides if slide["small"]] == []
    drawings = dict(drawing for slide in slides for drawing in slide["drawings"])
    page = browser.new_page()
    sizes = {}
    for address, scale in drawings.items():
        page.goto(address)
        sizes[Path(address).name] = page.evaluate(SMALLEST) * scale
    assert len(sizes) >= 6
    assert {name: size for name, size in sizes.items() if size < READABLE} == {}


def test_slides_look_the_same_on_a_dark_system(shown):
    slides, _ = shown
    assert [slide["title"] for slide in slides if slide["light"] != slide["dark"]] == []


def test_pictures_are_there_and_nothing_comes_from_the_network(shown):
    slides, said = shown
    assert said == []
    assert [slide["broken"] for slide in slides if slide["broken"]] == []


def test_the_pdf_has_a_page_for_each_slide(built, shown):
    slides, _ = shown
    pages = re.findall(rb"/Type\s*/Page\b", (built / "slides.pdf").read_bytes())
    assert len(pages) == len(slides)


def test_printed_slides_keep_their_margin(built, browser):
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{(built / 'index.html').as_uri()}?print-pdf")
    page.wait_for_selector(".pdf-page h1")
    left = page.evaluate(
        "[...document.querySelectorAll('.pdf-page h1')].map(title => title.getBoundingClientRect().left)"
    )
    assert min(left) >= 40


def test_the_last_slide_says_where_the_workshop_is(built, text):
    assert f'href="{ADDRESS}"' in (built / "index.html").read_text(encoding="utf-8")
    assert f"git clone {ADDRESS} \\ workshop" in text


def test_without_an_address_the_last_slide_invents_none(tmp_path):
    said = words(build(tmp_path, PATH=os.path.dirname(sys.executable)))  # without Chromium, so no PDF is printed
    assert "git clone" not in said and "make lab" in said


def test_numbers_are_those_that_were_measured(text):
    def result(name):
        return json.loads((ROOT / f"benchmarks/results/cpu2-{name}.json").read_text(encoding="utf-8"))

    inference = result("inference")
    assert f"two workers, {inference['precision']} {inference['images_per_s']['classify']:.0f} " in text
    row = result("launchers")["rows"]["this on Dask"]
    assert (
        f"{row['cold_s']:.1f} {row['warm_s']:.1f} {row['step_s']:.2f} {row['says_s']:.1f} {row['knows_s']:.1f}" in text
    )
    assert f"{len(result('faults')['table'])} faults" in text
    assert "{{" not in text


def test_all_launchers_that_were_measured_are_compared_in_all_that_was_measured(text):
    rows = json.loads((ROOT / "benchmarks/results/cpu2-launchers.json").read_text(encoding="utf-8"))["rows"]
    for tool, row in rows.items():
        name = "ddp.launch on Dask" if tool == "this on Dask" else tool
        warm = f"{row['warm_s']:.1f}" if "warm_s" in row else "–"
        assert f"{name} {row['lines']} {row['cold_s']:.1f} {warm} {row['step_s']:.2f}" in re.sub(" +", " ", text)


def test_no_measured_number_is_typed():
    source = re.sub(r"```.*?```|\{\{.*?\}\}", "", (SOURCE / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"[\d.,]+\s?(?:ms|s|MB|GB|%|hours|times|×)(?!\w)", source) == []
