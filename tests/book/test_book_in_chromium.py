"""The book in a real browser: quiet, readable on a desk, a tablet and a phone, searchable, fit for screen readers."""

import re

import pytest
from built import ROOT
from playwright.sync_api import expect

PHONE, TABLET, DESK = 390, 800, 1400
WIDTHS = [DESK, *(pytest.param(width, marks=pytest.mark.weekly) for width in (TABLET, PHONE))]
# The other notebooks are as these two, and the other pages of the reference as that one.
BUILT_ALIKE = r"docs/(?!reference/)|docs/reference/ddp|search|notebook_output/0[12]"
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
def test_every_page_is_quiet_and_no_line_is_cut_off(page_of, site, pages, width):
    said, found, page = [], {}, page_of(width)
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda response: said.append(response.url) if response.status >= 400 else None)
    for path in set(pages) - {"index.html"}:  # which leads on at once
        page.goto(f"{site}/{path}")
        found[path] = page.evaluate(CUT_OFF)
    assert not {path: wide for path, wide in found.items() if wide}
    assert not said


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_page_leads_to_the_menu_and_the_menu_to_a_notebook(page_of, site, width):
    page = page_of(width)
    page.goto(site)
    page.wait_for_url("**/docs/index.html")
    entry = page.locator(".bd-links a:visible", has_text="06 · Distributed training")
    if width < 992:  # the menu is folded
        expect(entry).to_have_count(0)
        page.locator(".primary-toggle:visible").click()
    entry.click()
    page.wait_for_url("**/06-distributed-training.html")


def test_imports_and_solutions_are_folded_until_they_are_wanted_and_lessons_open(page, site):
    page.goto(f"{site}/notebook_output/06-distributed-training.html")
    for fold in (page.locator("details", has_text="Show imports and set-up"), page.locator(".cell.tag_solution")):
        code = fold.first.locator("pre").first
        expect(code).not_to_be_visible()
        fold.first.locator("summary").click()
        expect(code).to_be_visible()
    expect(page.locator(".cell_input pre", has_text="def train_alone").first).to_be_visible()


def test_the_search_page_finds_rank(page, site):
    page.goto(f"{site}/search.html")
    field = page.locator("input[name=q]:visible").first
    field.fill("rank")
    field.press("Enter")
    page.locator("#search-results li a", has_text="Distributed training").first.click()
    page.wait_for_url("**/06-distributed-training.html**")


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
def test_in_the_dark_an_output_made_for_white_paper_keeps_it_and_a_choice_is_seen(page_of, site):
    page = page_of(scheme="dark")
    page.goto(f"{site}/notebook_output/02-dask-basics.html")
    graph = page.locator(".cell_output .text_html:has(svg)").first
    assert graph.evaluate("node => getComputedStyle(node).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    page.goto(f"{site}/notebook_output/quiz.html")
    choice = page.locator(".cell_output input[type=radio]").first
    assert choice.evaluate("node => getComputedStyle(node).colorScheme") == "light"


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("path", "n_pages"),
    [("cheat-sheet", range(1, 3)), ("instructor/handouts", [len(list((ROOT / "notebook_output").glob("[0-9]*")))])],
)
def test_what_is_made_for_paper_fits_on_it(page_of, site, path, n_pages):
    page = page_of()
    page.goto(f"{site}/docs/{path}.html")
    pdf = page.pdf(format="A4", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) in n_pages
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 673, "height": 1020})  # A4 without its margins, in CSS pixels
    hidden = page.locator(".handout").evaluate_all(
        "sheets => sheets.filter(it => it.scrollHeight > it.clientHeight + 1).map(it => it.innerText.split('\\n')[0])"
    )
    assert hidden == [], "a sheet has more text than its page shows"
