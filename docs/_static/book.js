// What the theme lacks: the contents of a page follow the reader, also when they jump; feedback names its section;
// the boxes of a checklist can be ticked; the menu shows where one is; the search has messages first, and quotes a page
// without its contents; what explains a guess is open, as its cell has run; the film on the first page plays by itself;
// on a phone, wide tables are cards, charts and what cells have printed are as wide as the page, comments of the cheat
// sheet stand above their lines, and tables of figures fold.

const contents = () => [...document.querySelectorAll("#pst-page-toc-nav a[href^='#']")];
const headingOf = (link) => document.getElementById(decodeURIComponent(link.hash.slice(1)));

// The entry of the section whose heading was scrolled past last.
const current = () => contents().findLast((link) => headingOf(link)?.getBoundingClientRect().top < innerHeight / 3);

function mark() {
  const here = current();
  for (const link of contents()) {
    link.classList.toggle("active", link === here);
    if (link === here) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// The theme marks a heading that comes into view, after the event: this has the last word.
addEventListener("scroll", () => setTimeout(mark, 50), { passive: true });

document.querySelector("a.feedback")?.addEventListener("click", ({ currentTarget: link }) => {
  const url = new URL(link.href);
  const section = current()?.textContent.trim();
  if (section) url.searchParams.set("body", `Section: ${section}\n\n`);
  link.href = url;
});

for (const box of document.querySelectorAll(".task-list-item-checkbox")) {
  box.disabled = false;
  box.setAttribute("aria-label", box.closest("li").textContent.trim());
}

// The film plays by itself, unless the reader's system asks for stillness; who clicks it gets the controls, until the next
// click elsewhere.
for (const film of document.querySelectorAll("video.film")) {
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) film.play();
  film.addEventListener("focus", () => (film.controls = true));
  document.addEventListener("click", ({ target }) => (film.controls = target === film));
}

// On a phone a chart has the width of the page; a tap gives its letters their size, and another takes it back.
for (const chart of document.querySelectorAll(".cell_output > img")) {
  chart.addEventListener("click", () => chart.classList.toggle("large"));
}

// On a phone a table becomes cards (see book.css) if what is behind its first column is longer than a line of text.
const LINE = 46 * parseFloat(getComputedStyle(document.documentElement).fontSize);
for (const table of document.querySelectorAll(".pst-scrollable-table-container > table")) {
  if (table.closest(".handout")) continue; // made for paper
  table.style.cssText = "width: max-content; font-size: 1rem";
  table.classList.toggle("cards", table.offsetWidth - table.rows[0].cells[0].offsetWidth > LINE);
  table.removeAttribute("style");
  const names = [...table.querySelectorAll("thead th")].map((name) => name.textContent.trim());
  if (names.length < 3) continue; // of two columns the first one heads the card
  for (const { cells } of table.querySelectorAll("tbody tr")) {
    names.forEach((name, n) => {
      if (n || /^\d/.test(cells[n].textContent)) cells[n].dataset.label = name; // a number alone heads no card
    });
  }
}

// On a phone what a cell has printed, and commands, get smaller letters, down to 9 px, before they have to be scrolled.
if (innerWidth < 720) {
  const whole = ".cell_output div.highlight pre, div.highlight-sh pre, #the-command pre";
  for (const printed of document.querySelectorAll(whole)) {
    const size = parseFloat(getComputedStyle(printed).fontSize) * (printed.clientWidth / printed.scrollWidth);
    if (printed.scrollWidth > printed.clientWidth) printed.style.fontSize = `${Math.max(9, size)}px`;
  }
  for (const comment of document.querySelectorAll("#cheat-sheet pre .c1")) {
    comment.previousSibling.textContent = comment.previousSibling.textContent.trimEnd();
    let first = comment; // of its line
    while (first.previousSibling && !first.previousSibling.textContent.includes("\n")) first = first.previousSibling;
    const indent = first.previousSibling?.textContent.split("\n").pop() ?? "";
    first.before(comment, `\n${indent}`);
  }
}

// On a phone the page of figures would be as long as twenty-five screens.
if (innerWidth < 720) {
  for (const table of document.querySelectorAll("#figures .pst-scrollable-table-container")) {
    const fold = Object.assign(document.createElement("details"), { className: "section" });
    table.before(fold);
    fold.append(Object.assign(document.createElement("summary"), { textContent: "Show the table" }), table);
  }
  const asked = () => {
    const at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = at && (at.closest("details.section") ?? at.querySelector("details.section"));
    if (fold) fold.open = true;
  };
  addEventListener("hashchange", asked);
  asked();
}

for (const fold of document.querySelectorAll("details")) {
  if (fold.querySelector("summary")?.textContent.trim() === "After you have run it") fold.open = true;
}

addEventListener("load", () => {
  const menu = document.querySelector(".bd-sidebar-primary");
  const entry = menu?.querySelector(".bd-links .current.active");
  if (entry) menu.scrollTop += entry.getBoundingClientRect().top - menu.clientHeight / 2;
});

if (typeof Search !== "undefined") {
  // Who looks for a term, or for the words of an error, wants to know what it means, or what to do about it.
  const answers = ["docs/glossary", "docs/troubleshooting"];
  Scorer.score = ([page, , , , score, , kind]) => score + (answers.includes(page) && kind === "title" ? 100 : 0);
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".bd-sidebar-secondary, #jb-print-docs-body, .bd-header-article").forEach((part) => part.remove());
    return textOf(page.documentElement.outerHTML, anchor);
  };
}
