"""The film and its still are there, small, and as large as the pages say; `make film` says what it needs."""

import re
from pathlib import Path

import film
import pytest
from PIL import Image

PROJECT = Path(__file__).parents[2]
KILL = PROJECT / "img" / "kill.webm"
STILL = KILL.with_suffix(".png")
PAGES = (PROJECT / "README.md", PROJECT / "docs" / "index.md")
# A WebM's element Video: PixelWidth (0xb0) and PixelHeight (0xba), two bytes each.
SIZE = re.compile(rb"\xb0\x82(..)\xba\x82(..)", re.DOTALL)


def size_of(webm):
    return tuple(int.from_bytes(part) for part in SIZE.search(webm).groups())


def test_the_film_and_its_still_are_small_and_of_one_size():
    webm = KILL.read_bytes()
    assert webm.startswith(b"\x1aE\xdf\xa3") and b"V_VP9" in webm[:2000]
    assert len(webm) <= 1_500_000 and STILL.stat().st_size <= 300_000
    with Image.open(STILL) as still:
        assert size_of(webm) == still.size == (film.WIDTH, film.HEIGHT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_shows_the_film_or_its_still_keeps_its_shape(page):
    shown = re.findall(r"<(?:video|img)\b[^>]*kill\.(?:webm|png)[^>]*>", page.read_text(encoding="utf-8"))
    for tag in shown:
        width, height = (re.search(rf'\b{name}="(\d+)"', tag) for name in ("width", "height"))
        if width and height:
            assert int(width[1]) * film.HEIGHT == int(height[1]) * film.WIDTH, tag


def test_without_ffmpeg_the_film_is_not_begun_and_the_cure_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="ffmpeg.*apt install ffmpeg"):
        film.main()
