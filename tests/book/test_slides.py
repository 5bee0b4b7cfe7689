"""The slides in Chromium: all fit, can be read from the last row, have notes, need no network and print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "docs/slides"
ADDRESS = "https://github.com/someone/workshop"
READABLE = 20  # pixels of a slide that is 720 high
# What is the matter with a slide: contents beyond its edges, small text, cut code, pictures, no notes.
TROUBLES = """readable => {
    const slide = Reveal.getCurrentSlide(), right = slide.getBoundingClientRect().right + 1, found = []
    for (const element of slide.querySelectorAll('*:not(aside, aside *)')) {
        const box = element.getBoundingClientRect(), said = element.textContent.trim() || element.src
        const written = [...element.childNodes].some(node => node.nodeType == 3 && node.textContent.trim())
        const size = parseFloat(getComputedStyle(element).fontSize) * Reveal.getScale()
        if (box.right > right || box.bottom > 705) found.push(`leaves the slide: ${said}`)
        if (box.width && written && size < readable) found.push(`${size} px: ${said}`)
        if (element.matches('pre, code') && element.scrollWidth > element.clientWidth + 1) found.push(`is cut: ${said}`)
        if (element.matches('img') && !(element.naturalWidth && element.alt)) found.push(`broken: ${said}`)
    }
    const notes = slide.querySelector('aside.notes')?.textContent.split(/\\s+/) ?? []
    if (notes.length < 15) found.push('has no notes')
    return found.map(trouble => `${slide.querySelector('h1').textContent} ${trouble}`)
}"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "revealjs", SOURCE, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"WORKSHOP_REPOSITORY": ADDRESS})
    assert done.returncode == 0, done.stderr
    return folder


def test_every_slide_fits_can_be_read_has_notes_and_needs_no_network(built, browser):
    said, page = [], browser.new_page(viewport={"width": 1280, "height": 720})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else said.append(request.url))
    page.goto((built / "index.html").as_uri())
    page.wait_for_function("Reveal.isReady()")
    page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    n_slides = page.evaluate("Reveal.getTotalSlides()")
    for position in range(n_slides):
        page.evaluate("position => Reveal.slide(position)", position)
        said += page.evaluate(TROUBLES, READABLE)
        pictures = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            pictures.add(page.screenshot(animations="disabled"))
        assert len(pictures) == 1, f"slide {position} looks different on a dark system"
    assert n_slides and said == []
    assert len(re.findall(rb"/Type\s*/Page\b", (built / "slides.pdf").read_bytes())) == n_slides


def test_the_last_slide_says_where_the_workshop_is(built):
    assert f'href="{ADDRESS}"' in (built / "index.html").read_text(encoding="utf-8")
