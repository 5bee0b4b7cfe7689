// What the theme lacks on a phone: wide tables are cards, charts have the width of the page, lines of code that are too
// long go on below, what cells have printed has smaller letters, and tables of figures fold.

// A tap gives the letters of a chart their size, and another takes it back.
for (const chart of document.querySelectorAll(".cell_output > img")) {
  chart.addEventListener("click", () => chart.classList.toggle("large"));
}

// A table becomes cards (see book.css) if what is behind its first column is longer than a line of text.
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

// One element for each line of a block. A tag that is open where a line ends is closed there, and opened again in the next.
function linesOf(block) {
  let open = "";
  return block.innerHTML.trimEnd().split("\n").map((line) => {
    const html = open + line;
    open = html.match(/<span[^>]*>(?!.*<)/)?.[0] ?? "";
    const whole = Object.assign(document.createElement("span"), { className: "line", innerHTML: html.replace(INDENT, "$1") });
    whole.prepend(indentOf(html.match(INDENT)?.[2] ?? ""));
    return whole;
  });
}

const INDENT = /^((?:<[^>]*>)*)( +)/;
const indentOf = (spaces) => Object.assign(document.createElement("span"), { className: "indent", textContent: spaces });

// A line that does not fit goes on below, indented (see book.css); a comment at its end stands above it.
function fold(block, letters) {
  const lines = linesOf(block).flatMap((line) => {
    const indent = line.querySelector(".indent");
    const comment = line.querySelector(".c1");
    line.style.setProperty("--indent", `${indent.textContent.length}ch`);
    if (line.textContent.length <= letters || !comment || line.textContent.trim() === comment.textContent) return [line];
    const above = line.cloneNode();
    above.append(indent.cloneNode(true), comment);
    return [above, line];
  });
  lines.forEach((line) => line.append("\n")); // for who copies it
  block.replaceChildren(...lines);
}

// Text that has been printed gets smaller letters, down to 9 px. What is wider is folded, but for tables as pandas prints
// them: their lines are all of one length.
function fit(block, letters) {
  const tooLong = block.textContent.split("\n").map((line) => line.length).filter((length) => length > letters);
  if (!tooLong.length) return;
  const size = (parseFloat(getComputedStyle(block).fontSize) * letters) / Math.max(...tooLong);
  const isTable = tooLong.length > 2 && new Set(tooLong).size === 1;
  if (size >= 9 || isTable) block.style.fontSize = `${Math.max(9, size)}px`;
  else fold(block, letters);
}

if (innerWidth < 720) {
  const blocks = [...document.querySelectorAll(".bd-article div.highlight pre")];
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const room = Math.max(...blocks.map((block) => block.clientWidth)) - 2 * rem; // those in closed folds have no width yet
  const letters = Math.floor(room / (0.6 * 0.7 * rem)); // of 0.7 rem; each is 0.6 times as wide as high
  for (const block of blocks) {
    if (block.closest(".cell_output, #the-command")) fit(block, letters);
    else fold(block, letters);
  }

  // The page of figures would be as long as twenty-five screens.
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
