"""The book in a real browser: quiet, readable on a phone and a desk, searchable, and fit for screen readers."""

import pytest

WIDTHS = (390, 1400)  # a phone, a desk
BUILT_ALIKE = ("docs", "search", "notebook_output/01", "notebook_output/02")  # the other notebooks are as these two
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(browser, site, pages, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page, found = context.new_page(), {}
    for path in filter(lambda path: path.startswith(BUILT_ALIKE), pages):
        page.goto(f"{site}/{path}")
        page.locator(f"html[data-theme={scheme}]").wait_for()
        # Code takes axe seconds, and looks alike on all pages: that of one is enough.
        within = {"exclude": [["div.highlight"]]} if path.startswith("notebook_output") and "/01" not in path else {}
        violations = axe.Axe().run(page, context=within).response["violations"]
        found[path] = [(each["id"], each["nodes"][0]["html"]) for each in violations]
    context.close()
    assert not {path: violations for path, violations in found.items() if violations}


def test_in_the_dark_an_output_made_for_white_paper_keeps_it(browser, site):
    context = browser.new_context(color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{site}/notebook_output/02-dask-basics.html")
    graph = page.locator(".cell_output .text_html:has(svg)").first
    assert graph.evaluate("node => getComputedStyle(node).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    context.close()
