"""The book in a real browser: quiet, readable on a phone, a tablet and a desk, searchable, fit for screen readers."""

import re

import pytest
from playwright.sync_api import expect

WIDTHS = (390, 800, 1400)  # a phone, a tablet, a desk
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


@pytest.fixture(scope="module", params=WIDTHS)
def page(browser, request):
    context = browser.new_context(viewport={"width": request.param, "height": 900}, reduced_motion="reduce")
    yield context.new_page()
    context.close()


def test_every_page_is_quiet_and_no_line_is_cut_off(page, site, pages):
    said, found = [], {}
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda response: said.append(response.url) if response.status >= 400 else None)
    for path in set(pages) - {"index.html"}:  # which leads on at once
        page.goto(f"{site}/{path}")
        found[path] = page.evaluate(CUT_OFF)
    assert not {path: wide for path, wide in found.items() if wide}
    assert not said


def test_the_first_page_leads_into_the_book(page, site):
    page.goto(site)
    page.wait_for_url("**/docs/index.html")


def test_the_menu_lists_the_notebooks_and_leads_to_one(page, site):
    page.goto(f"{site}/notebook_output/02-dask-basics.html")
    entry = page.locator(".bd-links a:visible", has_text="06 · Distributed training")
    toggle = page.locator(".primary-toggle:visible")
    if page.viewport_size["width"] > 992:  # the menu is open, and its button folds it
        toggle.click()
        expect(entry).to_have_count(0)
        left = page.locator(".bd-article-container").bounding_box()["x"]
        assert left >= 0, "the page has moved out of the window"
    expect(entry).to_have_count(0)
    toggle.click()
    entry.click()
    page.wait_for_url("**/06-distributed-training.html")


def test_the_contents_of_a_page_open_and_follow_the_reader(page, site):
    page.goto(f"{site}/notebook_output/02-dask-basics.html")
    contents = page.locator("#pst-page-toc-nav a:visible")
    if page.viewport_size["width"] < 1200:
        page.locator(".secondary-toggle:visible").click()
    contents.last.click()
    page.keyboard.press("Escape")
    last = page.locator("#pst-page-toc-nav a").last
    expect(last).to_have_class(re.compile("active"))
    page.evaluate("scrollTo(0, 0)")
    expect(page.locator("#pst-page-toc-nav a.active")).to_have_count(0)  # above the first section


def test_wrapped_code_keeps_its_indentation_and_diagrams_their_letters(page, site):
    page.goto(f"{site}/notebook_output/06-distributed-training.html")
    code = page.locator(".cell_input pre", has_text="def train_alone").first
    assert code.evaluate("node => getComputedStyle(node).whiteSpace") == "pre"
    drawing = page.locator("article a img[src$='.svg']").first
    assert drawing.evaluate("node => node.getBoundingClientRect().width / node.naturalWidth") > 0.7
    drawing.click()
    page.wait_for_url("**/_images/*.svg")


def test_imports_and_charts_are_folded_and_lessons_open(page, site):
    page.goto(f"{site}/notebook_output/06-distributed-training.html")
    for prompt, line in (("Show imports and set-up", "import torch"), ("Show the code of the chart", "p9.ggplot")):
        fold = page.locator("details", has_text=prompt).first
        code = fold.locator("pre", has_text=line).first
        expect(code).not_to_be_visible()
        fold.locator("summary").click()
        expect(code).to_be_visible()
    expect(page.locator(".cell_input pre", has_text="def train_alone").first).to_be_visible()


def test_the_search_page_finds_rank(page, site):
    page.goto(f"{site}/search.html")
    field = page.locator("input[name=q]:visible").first
    field.fill("rank")
    field.press("Enter")
    page.locator("#search-results li a", has_text="Distributed training").first.click()
    page.wait_for_url("**/06-distributed-training.html**")


def test_a_word_of_the_glossary_leads_there(page, site):
    page.goto(f"{site}/notebook_output/06-distributed-training.html")
    page.locator("a.term", has_text="world size").click()
    page.wait_for_url("**/docs/glossary.html#world-size")
    assert page.locator("#world-size p").first.is_visible()


def test_a_solution_unfolds(page, site):
    page.goto(f"{site}/notebook_output/01-getting-started.html")
    solution = page.locator(".cell.tag_solution").first
    code = solution.locator("pre").first
    assert not code.is_visible()
    solution.locator("summary").click()
    assert code.is_visible()


def test_the_search_and_the_entry_of_the_page_stay_in_the_menu(browser, site):
    context = browser.new_context(viewport={"width": 1400, "height": 700})
    page = context.new_page()
    page.goto(f"{site}/docs/next-steps.html")
    expect(page.locator(".bd-sidebar-primary .search-button-field")).to_be_in_viewport()
    expect(page.locator(".bd-links .current.active > a")).to_be_in_viewport()
    context.close()


def test_what_a_cell_prints_is_whole_on_a_desktop_and_a_chart_keeps_its_letters_on_a_phone(browser, site):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{site}/notebook_output/12-when-it-goes-wrong.html")
    printed = page.locator(".cell_output pre")
    assert printed.evaluate_all("all => all.filter(each => each.scrollWidth > each.clientWidth + 1).length") == 0
    page.set_viewport_size({"width": 390, "height": 900})
    chart = page.locator(".cell_output > img").first
    chart.scroll_into_view_if_needed()
    assert chart.evaluate("image => image.clientWidth == image.naturalWidth || image.clientWidth > 600")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.weekly)])
def test_axe_finds_nothing_wrong(browser, site, pages, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page, found = context.new_page(), {}
    for path in filter(re.compile(BUILT_ALIKE).match, pages):
        page.goto(f"{site}/{path}")
        page.locator(f"html[data-theme={scheme}]").wait_for()
        # Code takes axe seconds, and looks alike on all pages: that of one is enough.
        within = {"exclude": [["div.highlight"]]} if path.startswith("notebook_output") and "/01" not in path else {}
        violations = axe.Axe().run(page, context=within).response["violations"]
        found[path] = [(each["id"], each["nodes"][0]["html"]) for each in violations]
    context.close()
    assert not {path: violations for path, violations in found.items() if violations}


def test_in_the_dark_plots_have_no_frame_and_an_empty_choice_looks_empty(browser, site):
    context = browser.new_context(color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{site}/notebook_output/07-learning-results.html")
    assert page.locator(".cell_output img").first.evaluate("node => getComputedStyle(node).padding") == "0px"
    page.goto(f"{site}/notebook_output/quiz.html")
    choice = page.locator(".cell_output input[type=radio]").first
    assert choice.evaluate("node => getComputedStyle(node).colorScheme") == "light"
    context.close()


def test_in_the_dark_an_output_made_for_white_paper_keeps_it(browser, site):
    context = browser.new_context(color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{site}/notebook_output/02-dask-basics.html")
    graph = page.locator(".cell_output .text_html:has(svg)").first
    assert graph.evaluate("node => getComputedStyle(node).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    context.close()
