// What the theme lacks: the contents of a page follow the reader, also when they jump; feedback names its section;
// the boxes of a checklist can be ticked; the menu shows where one is; the search has messages first, and quotes a page
// without its contents; what explains a guess is open, as its cell has run; the film on the first page plays by itself.
// What it lacks on a phone is in phone.js.

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
    const around = ".bd-sidebar-secondary, #jb-print-docs-body, .bd-header-article, .launch";
    page.querySelectorAll(around).forEach((part) => part.remove());
    return textOf(page.documentElement.outerHTML, anchor).replace(/[\u2580-\u259f]+/g, ""); // without the figures' bars
  };
  const summaryOf = Search.makeSearchSummary; // it is given stems: of "nanny" that is "nanni", which no page has
  Search.makeSearchSummary = (html, stems, anchor) => {
    const words = new URLSearchParams(location.search).get("q").match(/\S+/g) ?? [];
    return summaryOf(html, [...stems, ...words], anchor);
  };
}
