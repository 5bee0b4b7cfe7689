// What the theme lacks on a phone: wide tables are cards, charts have the width of the page, lines of code that are too
// long go on below, what cells have printed has smaller letters, and tables of figures fold.

const isNarrow = () => innerWidth < 720;

// A tap, or a key, shows a chart or a screenshot as large as the screen (see book.css), until the next.
const pictures = [...document.querySelectorAll(".cell_output > img, .bd-article p > img[src$='.png']:not([src*='sketches'])")];
for (const picture of pictures) {
  const hint = Object.assign(document.createElement("small"), { className: "hint", textContent: "Tap for full screen" });
  picture.before(hint);
  const enlarge = () => {
    if (picture.tabIndex) return;
    const dialog = Object.assign(document.createElement("dialog"), { className: "picture" });
    dialog.append(picture.cloneNode());
    history.pushState(null, ""); // the phone's own way back closes the picture, too
    addEventListener("popstate", () => dialog.remove(), { once: true });
    dialog.addEventListener("click", ({ detail }) => detail < 2 && history.back());
    dialog.addEventListener("cancel", () => history.back());
    dialog.addEventListener("keydown", (event) => event.stopPropagation()); // Sphinx's own scripts would take Escape
    picture.after(dialog);
    dialog.showModal();
  };
  picture.addEventListener("click", ({ detail }) => detail < 2 && enlarge()); // of a double tap, the first counts
  picture.addEventListener("keydown", (event) => {
    if (!["Enter", " "].includes(event.key)) return;
    event.preventDefault(); // the page would scroll
    enlarge();
  });
}

// Only one that grows by half or more, or that the page of a turned phone cannot show whole: sizes are known once the page
// has loaded.
function offerTaps() {
  for (const picture of pictures) {
    const grows = isNarrow() && picture.naturalWidth > 1.5 * innerWidth;
    const isCut = innerHeight < 500 && picture.offsetHeight > 0.8 * innerHeight; // below the page's own bar
    picture.parentElement.classList.toggle("enlarges", grows || isCut);
    picture.tabIndex = grows || isCut ? 0 : -1;
    picture.role = grows || isCut ? "button" : null;
  }
}
addEventListener("load", offerTaps);

// The contents of a page lie over it, and who has chosen a section wants to read it.
document.addEventListener("click", ({ target }) => {
  if (target.closest("dialog a[href^='#']")) target.closest("dialog").close();
});

// A table becomes cards (see book.css) if what is behind its first column is longer than a line of text. Numbers stay in
// columns, which one compares.
const LINE = 46 * parseFloat(getComputedStyle(document.documentElement).fontSize);
for (const table of document.querySelectorAll(".pst-scrollable-table-container > table")) {
  table.style.cssText = "width: max-content; font-size: 1rem";
  const isOfNumbers = [...table.querySelectorAll("tbody td:not(:first-child)")].every((cell) => cell.matches(".text-right"));
  table.classList.toggle("cards", !isOfNumbers && table.offsetWidth - table.rows[0].cells[0].offsetWidth > LINE);
  table.removeAttribute("style");
  const names = [...table.querySelectorAll("thead th")].map((name) => name.textContent.trim());
  if (names.length < 3) continue; // of two columns the first one heads the card
  for (const { cells } of table.querySelectorAll("tbody tr")) {
    names.forEach((name, n) => {
      if (n || /^\d/.test(cells[n].textContent)) cells[n].dataset.label = name; // a number alone heads no card
    });
  }
}

// One element for each line of a block. A tag that is open where a line ends is closed there, and opened again in the next.
function linesOf(block) {
  let open = "";
  return block.innerHTML.trimEnd().split("\n").map((text) => {
    const html = open + text;
    open = html.match(/<span[^>]*>(?!.*<)/)?.[0] ?? "";
    const [, tags, spaces] = html.match(/^((?:<[^>]*>)*)( *)/);
    const line = Object.assign(document.createElement("span"), { className: "line" });
    line.innerHTML = `<span class="indent">${spaces}</span>${tags}${html.slice(tags.length + spaces.length)}`;
    line.style.setProperty("--indent", `${spaces.length}ch`);
    return line;
  });
}

// A line that does not fit goes on below, indented, as does the comment at its end (see book.css). Three or more lines of
// one length, one after the other, are a table as pandas prints it: it stays whole.
function fold(block, letters) {
  const lines = linesOf(block);
  const lengths = lines.map((line) => line.textContent.length);
  const comments = lines.map((line) => (line.textContent.trim()[0] === "#" ? null : line.querySelector(".c1")));
  const areBelow = lines.some((_, n) => comments[n] && lengths[n] > letters);
  lines.forEach((line, n) => {
    const isLike = (k) => lengths[k] === lengths[n];
    const isInTable = (isLike(n - 1) && (isLike(n - 2) || isLike(n + 1))) || (isLike(n + 1) && isLike(n + 2));
    if (lengths[n] > letters) {
      if (isInTable) line.classList.add("whole");
      else offerBreaks(line);
    }
    comments[n]?.classList.toggle("below", areBelow);
    (areBelow && comments[n] ? comments[n] : line).append("\n"); // for who copies it
  });
  block.replaceChildren(...lines);
}

// Where a line may end besides at a space: behind a bracket, a comma or an @, between the parts of a path, before a method
// or a port.
const BREAK = /(?<=[(\[])(?![)\]])|(?<=,)(?! )|(?<=@)|(?<=\/)(?<!\/\/)(?!\/)|(?<=[)\]])(?=\.)|(?=:\d\d)/g;

// An option stays whole, where a browser would end the line behind a hyphen.
const OPTION = /((?<!\S)--?[\w-]+)/;

function wordsOf(text) {
  const option = (textContent) => Object.assign(document.createElement("span"), { className: "option", textContent });
  return text.split(OPTION).map((word, n) => (n % 2 ? option(word) : word));
}

// Colours put a bracket into an element of its own: the places are those of the whole line.
function offerBreaks(line) {
  const places = [...line.textContent.matchAll(BREAK)].map(({ index }) => index);
  const texts = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  const all = [];
  while (texts.nextNode()) all.push(texts.currentNode);
  let begin = 0;
  for (const text of all) {
    const end = begin + text.length;
    const cuts = [begin, ...places.filter((place) => place > begin && place <= end), end];
    const parts = cuts.slice(1).map((cut, n) => text.data.slice(cuts[n] - begin, cut - begin));
    text.replaceWith(...parts.flatMap((part) => [...wordsOf(part), document.createElement("wbr")]).slice(0, -1));
    begin = end;
  }
}

// Printed text that is too wide gets letters of 9 px; what is still too wide is folded.
function fit(block, letters) {
  const longest = Math.max(...block.textContent.split("\n").map((line) => line.length));
  if (longest <= letters) return;
  block.classList.add("small");
  const most = Math.floor((letters * 0.7 * REM) / 9);
  if (longest > most) fold(block, most);
}

const REM = parseFloat(getComputedStyle(document.documentElement).fontSize);
const written = new Map(); // what was in each block before it was folded

function foldAll() {
  const blocks = [...document.querySelectorAll(".bd-article div.highlight pre")];
  for (const block of blocks) {
    if (!written.has(block)) written.set(block, block.innerHTML);
    block.innerHTML = written.get(block);
    block.classList.remove("small");
  }
  const room = Math.max(...blocks.map((block) => block.clientWidth)) - 2 * REM; // those in closed folds have no width yet
  const letters = Math.floor(room / (0.6 * 0.7 * REM)); // of 0.7 rem; each is 0.6 times as wide as high
  for (const block of blocks) {
    if (block.closest(".tag_prose .cell_output")) continue; // sentences, which go on below by themselves
    if (block.closest(".cell_output, #the-command")) fit(block, letters);
    else fold(block, letters);
  }
}

// The page of figures would be as long as twenty-five screens.
function foldTables() {
  for (const table of document.querySelectorAll("#figures section .pst-scrollable-table-container")) {
    const details = Object.assign(document.createElement("details"), { className: "section" });
    const rows = table.querySelectorAll("tbody tr").length;
    table.before(details);
    details.append(Object.assign(document.createElement("summary"), { textContent: `Show the table, ${rows} rows` }), table);
  }
  const asked = () => {
    const at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = at && (at.closest("details.section") ?? at.querySelector("details.section"));
    if (details) details.open = true;
  };
  addEventListener("hashchange", asked);
  asked();
}

// Also where a phone is turned, or a window changes its width.
let width = 0;
let shut = []; // what was folded before a phone was turned
function adapt() {
  if (innerWidth === width) return; // as where a phone's address bar goes
  width = innerWidth;
  offerTaps();
  const folds = [...document.querySelectorAll("details.section")];
  if (isNarrow()) {
    foldAll();
    if (!folds.length) foldTables();
    shut.forEach((details) => (details.open = false));
    shut = [];
  } else {
    shut.push(...folds.filter((details) => !details.open));
    folds.forEach((details) => (details.open = true));
  }
}
addEventListener("resize", adapt);
adapt();
