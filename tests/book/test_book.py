"""The book, built once: as files, where nothing leads nowhere, and in a real browser, quiet and fit for all widths.

One file, as pytest-xdist gives files to processes, and each process would build the book.
"""

import importlib
import inspect
import re
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from built import ROOT
from playwright.sync_api import expect

RENDERED = ROOT / "notebook_output"
NOTEBOOKS = sorted(str(path.relative_to(RENDERED).with_suffix("")) for path in RENDERED.rglob("*.ipynb"))
LESSONS = [name for name in NOTEBOOKS if name[0].isdigit()]
MODULES = re.findall(r"^   workshop_utils\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
PHONE, TABLET, DESK = 390, 800, 1400
WIDTHS = [DESK, *(pytest.param(width, marks=pytest.mark.weekly) for width in (TABLET, PHONE))]
# The other notebooks are as these two, and the other pages of the reference as that one.
BUILT_ALIKE = r"docs/(?!reference/)|docs/reference/daskrun|search|notebook_output/0[12]"
CUT_OFF = """() => {
    const wide = [];
    const width = document.scrollingElement.scrollWidth;
    if (width > innerWidth) wide.push(`the page: ${width}`);
    for (const pre of document.querySelectorAll("article pre, article table, article img, article svg")) {
        const box = pre.getBoundingClientRect();
        if (!box.width) continue;  // folded
        let scrolls = false;
        for (let node = pre; node.tagName !== "ARTICLE"; node = node.parentElement)
            scrolls ||= ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
        if (!scrolls && (box.right > innerWidth || pre.scrollWidth > pre.clientWidth + 1 && pre.tagName === "PRE"))
            wide.push(`${pre.tagName} ${pre.textContent.slice(0, 60)}`);
    }
    return wide;
}"""

# The size in pixels, as shown, of the smallest letters of each diagram that one sees.
LETTERS = """async () => {
    const sizes = {};
    for (const image of document.querySelectorAll("article img[src$='.svg']:not(.sd-card-img-top)")) {
        if (!image.getClientRects().length) continue;
        const host = document.createElement("div").attachShadow({mode: "open"});
        document.body.append(host.host);
        host.innerHTML = await (await fetch(image.src)).text();
        const scale = image.clientWidth / host.querySelector("svg").viewBox.baseVal.width;
        const letters = [...host.querySelectorAll("text")].map(text => parseFloat(getComputedStyle(text).fontSize));
        sizes[image.src] = scale * Math.min(...letters);
    }
    return sizes;
}"""
LINKS = "article a[href]:not(.headerlink, .term, .badge-link, p.ways a, .sd-stretched-link, .prev-next-area a)"

pytestmark = pytest.mark.timeout(900)  # ends a hang; on a busy machine the one build takes minutes


def test_no_link_and_no_picture_leads_nowhere(book, pages):
    missing = []
    for path, page in pages.items():
        for tag, name in (("a", "href"), ("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src")):
            for target in filter(None, (attributes.get(name) for attributes in page.all(tag))):
                if urlsplit(target).scheme:
                    continue
                to, anchor = urldefrag(unquote(target))
                file = (book / path).parent / to.split("?")[0] if to else book / path
                relative = file.resolve().relative_to(book.resolve()).as_posix()
                there = file.is_file() and (relative not in pages or not anchor or anchor in pages[relative].ids)
                if not there and not relative.startswith("slides"):  # `make book` builds those beside the book
                    missing.append(f"{path}: {target}")
    assert not missing


def test_the_book_needs_no_kernel_and_no_eyes(pages):
    for path, page in pages.items():
        assert not page.all("iframe") and "jupyter.widget" not in page.text, path
        assert not [image["src"] for image in page.all("img") if len(image.get("alt") or "") < 20], path


def test_the_reference_has_all_that_is_public_with_types(pages):
    assert MODULES
    for module in MODULES:
        page, code = pages[f"docs/reference/{module}.html"], importlib.import_module(f"workshop_utils.{module}")
        for name, value in vars(code).items():
            mine = getattr(value, "__module__", None) == code.__name__
            if mine and (inspect.isfunction(value) or inspect.isclass(value)) and not name.startswith("_"):
                assert f"{code.__name__}.{name}" in page.ids, f"{module}.{name} has no docstring"
        assert page.all("dl", "field-list") and "<em" in page.text, f"{module}: no type is shown"
    wanted = ("Job", "Job.rows", "Job.explain", "JobError", "WorkerDied", "WorkersBusy")  # defined elsewhere
    assert {f"daskrun.{name}" for name in wanted} <= pages["docs/reference/daskrun.html"].ids


def test_the_address_of_the_site_leads_to_the_front_page(pages):
    assert 'url=docs/index.html"' in pages["index.html"].text


def test_each_picture_says_what_it_shows(pages):
    said = [(path, alt) for path, page in pages.items() for alt in re.findall(r'<img[^>]* alt="([^"]*)"', page.text)]
    assert said and [(path, alt) for path, alt in said if not alt or "_images/" in alt] == []


def test_without_a_repository_no_page_guesses_one(pages):
    for path, page in pages.items():
        assert not re.search(r"codespaces\.new|blob/main|Source of this page", page.text), path


def test_without_a_repository_what_was_a_link_still_names_its_file(pages):
    found = [
        (path, text)
        for path, page in pages.items()
        for text in re.findall(r'<span class="outside">(.*?)</span>', page.text, re.DOTALL)
    ]
    assert found
    for path, text in found:
        assert "<code" in text or re.search(r"\w[/.]\w", text), f"{path}: {text}"


@pytest.fixture(scope="module")
def page_of(browser):
    """A function that opens a page of a width, in light or in dark."""
    contexts = []

    def opened(width=DESK, scheme="light"):
        size = {"width": width, "height": 900}
        contexts.append(context := browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce"))
        return context.new_page()

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def page(page_of):
    return page_of()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_quiet_needs_no_network_and_no_line_is_cut_off(page_of, site, pages, width):
    said, found, page = [], {}, page_of(width)
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda response: said.append(response.url) if response.status >= 400 else None)
    page.on("request", lambda request: None if request.url.startswith((site, "data:")) else said.append(request.url))
    for path in set(pages) - {"index.html"}:  # which leads on at once
        page.goto(f"{site}/{path}")
        found[path] = page.evaluate(CUT_OFF)
    assert not {path: wide for path, wide in found.items() if wide}
    assert not said


def test_imports_and_solutions_are_folded_until_they_are_wanted_and_lessons_open(page, site):
    page.goto(f"{site}/notebook_output/06-distributed-training.html")
    for fold in (page.locator("details", has_text="Show imports and set-up"), page.locator(".cell.tag_solution")):
        code = fold.first.locator("pre").first
        expect(code).not_to_be_visible()
        fold.first.locator("summary").click()
        expect(code).to_be_visible()
    expect(page.locator(".cell_input pre", has_text="def train_steps").first).to_be_visible()


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("max_restarts", "docs/reference/daskrun"),
        ("The workers had different weights", "docs/troubleshooting.html#the-workers-had-different-weights"),
    ],
)
def test_the_search_begins_with_the_reference_for_an_argument_and_with_the_cure_for_a_message(words, first, page, site):
    page.goto(f"{site}/search.html?q={words}")
    expect(page.locator("#search-results li a").first).to_have_attribute("href", re.compile(first))


def test_what_the_search_quotes_holds_the_word(page, page_of, site):
    page.goto(f"{site}/search.html?q=nanny")  # whose stem, "nanni", no page has
    page.get_by_text("found").first.wait_for()
    quotes = page.locator("#search-results .context")
    expect(quotes.nth(4)).to_be_visible()
    assert all("nanny" in text.lower() and "Codespaces" not in text for text in quotes.all_inner_texts()[:5])
    phone = page_of(PHONE)
    phone.goto(f"{site}/search.html?q=bf16")  # beside which long names stand
    expect(phone.locator("#search-results .context").nth(7)).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_on_a_phone_the_contents_of_a_page_give_way_to_the_section_that_was_chosen(page_of, site):
    phone = page_of(PHONE)
    phone.goto(f"{site}/notebook_output/07-learning-results.html")
    phone.locator("button.secondary-toggle:visible").first.click()
    contents = phone.locator("dialog#pst-secondary-sidebar-modal")
    contents.get_by_role("link", name="Key points").click()
    expect(contents).to_be_hidden()
    expect(phone.locator("#key-points").get_by_role("heading")).to_be_in_viewport()


def test_the_film_has_controls_for_who_wants_them_and_the_first_page_has_a_card_for_each_lesson(page, site):
    page.goto(f"{site}/docs/index.html")
    film = page.locator("video.film")
    expect(film).not_to_have_attribute("controls", "")
    film.click()
    expect(film).to_have_attribute("controls", "")
    expect(page.locator(".lessons .sd-card")).to_have_count(len(LESSONS))


def test_instructors_have_a_menu_of_their_own(page, site):
    page.goto(f"{site}/docs/instructor/room.html")
    menu = page.get_by_role("navigation", name="For instructors")
    expect(menu.locator("li.current")).to_have_text("The room")
    menu.get_by_role("link", name="For learners").click()
    expect(page).to_have_url(f"{site}/docs/index.html")


@pytest.mark.weekly
def test_one_can_read_each_diagram_on_a_phone(page_of, site, pages):
    phone, sizes = page_of(PHONE), {}
    shown = [path for path, page in pages.items() if page.all("img", "narrow")]
    for path in shown:
        phone.goto(f"{site}/{path}")
        sizes |= phone.evaluate(LETTERS)
    assert len(sizes) >= len(shown) > 10
    assert min(sizes.values()) >= 12, sizes


def test_on_a_desk_each_diagram_is_shown_once(page, site):
    page.goto(f"{site}/docs/architecture.html")
    expect(page.locator("article img.wide:visible")).to_have_count(3)
    expect(page.locator("article img.narrow:visible")).to_have_count(0)


def test_on_a_phone_a_wide_table_is_cards_that_name_each_column(page_of, site):
    page = page_of(PHONE)
    page.goto(f"{site}/docs/figures.html#classifying-photos")
    table = page.locator("table", has_text="what shows it")
    expect(table.locator("thead")).not_to_be_visible()
    names = table.locator("thead th").all_text_contents()
    cells = table.locator("tbody tr").first.locator("td")
    card = cells.evaluate_all("all => all.map(it => [getComputedStyle(it, '::before').content, it.offsetLeft])")
    assert [label for label, _ in card] == ["none", *(f'"{name}"' for name in names[1:])]
    assert len({left for _, left in card}) == 1, "the cells of a card stand below each other"
    expect(page.locator("table", has_text="× upstream").locator("thead")).to_be_visible()  # fits as it is
    shown = "all => all.filter(it => it.checkVisibility() && it.scrollWidth > it.clientWidth).length"
    assert page.locator(".pst-scrollable-table-container").evaluate_all(shown) == 0


@pytest.mark.weekly
def test_on_a_phone_code_goes_on_below_and_copies_as_it_was_and_printed_tables_stay_whole(page_of, page, site):
    phone, texts = page_of(PHONE), "blocks => blocks.map(block => block.textContent.trimEnd())"
    for path in ("notebook_output/04-parallel-inference", "notebook_output/07-learning-results", "docs/cheat-sheet"):
        for shown in (page, phone):
            shown.goto(f"{site}/{path}.html")
        blocks = phone.locator(".bd-article div.highlight pre")
        assert blocks.evaluate_all(texts) == page.locator(".bd-article div.highlight pre").evaluate_all(texts)
        cut = blocks.and_(phone.locator(":visible")).evaluate_all(
            "all => all.filter(block => block.scrollWidth > block.clientWidth && !block.querySelector('.whole'))"
            ".map(block => block.textContent)"
        )
        assert not cut, path
    expect(phone.locator(".line .below", has_text="1024: waits")).to_be_visible()  # not at the end of its line
    phone.goto(f"{site}/notebook_output/07-learning-results.html")
    table = phone.locator(".line.whole", has_text="from scratch").first
    assert table.evaluate("line => line.offsetHeight") < 20, "a line of a table is one line"


def test_on_a_phone_a_tap_shows_a_chart_on_the_whole_screen_and_the_next_takes_it_away(page_of, site):
    phone = page_of(PHONE)
    phone.goto(f"{site}/notebook_output/07-learning-results.html")
    phone.locator(".enlarges > img").first.click()
    enlarged = phone.locator("dialog.picture > img")
    box = enlarged.bounding_box()
    wide, high = phone.viewport_size["width"], phone.viewport_size["height"]
    assert (box["width"], box["height"]) == (wide, high)
    phone.set_viewport_size({"width": high, "height": wide})  # the phone is turned
    box = enlarged.bounding_box()
    assert box["height"] == wide and box["x"] + box["width"] == high - 40  # beside the cross
    enlarged.dblclick()  # of a double tap, the first counts
    expect(enlarged).to_have_count(0)
    phone.locator(".enlarges > img").first.dblclick()  # what is too high for a turned phone
    assert enlarged.bounding_box()["height"] == wide
    phone.keyboard.press("Escape")
    expect(enlarged).to_have_count(0)
    assert phone.url.endswith("07-learning-results.html")


@pytest.mark.weekly
def test_a_phone_that_is_turned_shows_what_it_shows_where_it_was_held_so_at_first(page_of, site):
    def folded(page):
        return page.locator(".bd-article div.highlight pre").evaluate_all(
            "blocks => blocks.map(block => block.innerHTML)"
        )

    upright, turned = page_of(PHONE), page_of(667)
    for page in (upright, turned):
        page.goto(f"{site}/notebook_output/07-learning-results.html")
    assert folded(turned) != folded(upright)
    turned.set_viewport_size({"width": PHONE, "height": 900})
    turned.wait_for_function(f"() => innerWidth === {PHONE}")
    assert folded(turned) == folded(upright)


def test_a_line_on_a_phone_ends_behind_a_bracket_and_in_no_option(page_of, site):
    page = page_of(PHONE)
    page.goto(f"{site}/docs/take-home.html")
    behind = page.locator("pre wbr").evaluate_all(
        "breaks => breaks.map(({ previousSibling: before, parentElement: parent }) =>"
        " (before?.textContent || parent.textContent).slice(-1))"
    )
    assert "(" in behind and "_" not in behind, behind
    assert "--nthreads" in page.locator("pre .option").all_inner_texts()


def test_on_a_phone_the_figures_fold_and_a_link_opens_its_section(page_of, site):
    page = page_of(PHONE)
    page.goto(f"{site}/docs/figures.html#which-launcher-and-when")
    folds = page.locator("details.section")
    expect(folds.first).to_be_visible()
    opened = [fold for fold in folds.all() if fold.get_attribute("open") is not None]
    assert len(opened) == 1 < folds.count() and "Ray Train" in opened[0].inner_text()
    assert page.evaluate("document.body.scrollHeight") < 13_000  # with all tables open it is nearly twice that
    for width in (844, PHONE):  # turned, and back
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"() => innerWidth === {width}")
    assert page.locator("details.section[open]").count() == 1


@pytest.mark.weekly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_links_have_one_colour_also_in_tables_and_around_code(page_of, site, scheme):
    page = page_of(scheme=scheme)
    for path in ("docs/coming-from", "docs/instructor/room", "docs/next-steps"):
        page.goto(f"{site}/{path}.html")
        page.locator(f"html[data-theme={scheme}]").wait_for()
        colours = page.locator(LINKS).evaluate_all(
            "links => links.map(link => getComputedStyle(link.querySelector('code') ?? link).color)"
        )
        assert len(set(colours)) == 1, (path, set(colours))


@pytest.mark.weekly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(page_of, site, pages, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page, found = page_of(scheme=scheme), {}
    for path in filter(re.compile(BUILT_ALIKE).match, pages):
        page.goto(f"{site}/{path}")
        page.locator(f"html[data-theme={scheme}]").wait_for()
        # Code takes axe seconds, and looks alike on all pages: that of one is enough.
        within = {"exclude": [["div.highlight"]]} if path.startswith("notebook_output") and "/01" not in path else {}
        violations = axe.Axe().run(page, context=within).response["violations"]
        found[path] = [(each["id"], each["nodes"][0]["html"]) for each in violations]
    assert not {path: violations for path, violations in found.items() if violations}


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("path", "n_pages"),
    [("cheat-sheet", range(1, 3)), ("instructor/handouts", [len(LESSONS)])],
)
def test_what_is_made_for_paper_fits_on_it(page_of, site, path, n_pages):
    page = page_of()
    page.goto(f"{site}/docs/{path}.html")
    pdf = page.pdf(format="A4", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) in n_pages
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 673, "height": 1043})  # A4 without its margins, in CSS pixels
    hidden = page.locator(".handout").evaluate_all(
        "sheets => sheets.filter(it => it.scrollHeight > it.clientHeight + 1).map(it => it.innerText.split('\\n')[0])"
    )
    assert hidden == [], "a sheet has more text than its page shows"
