"use strict";
(() => {
  // Everything shows without this. It tells what is under the pointer, sorts tables, and folds all sections at once.
  const said = document.createElement("div");
  said.className = "ip-said";
  said.setAttribute("role", "status");
  document.body.append(said);

  const text = (cell) => (cell ? cell.textContent.trim() : "");

  // Heat maps: the labels and the number of a cell, by pointer, by touch and with the arrow keys.
  let here = null;
  const tell = (cell) => {
    if (here) here.classList.remove("ip-here");
    here = cell;
    if (!cell) return said.replaceChildren();
    cell.classList.add("ip-here");
    const grid = cell.closest(".ip-grid");
    const names = grid.dataset.corner.split(" / ");
    const row = text(cell.parentNode.cells[0]);
    const column = text(grid.tHead.rows[0].cells[cell.cellIndex]);
    const label = (name, entry) => (name ? name + " " : "") + entry;
    const unit = grid.dataset.unit ? " " + grid.dataset.unit : "";
    const more = cell.title && !cell.title.startsWith(row) ? "\n" + cell.title : "";
    const faint = cell.classList.contains("ip-faint") ? ", within the noise floor" : "";
    said.textContent = `${label(names[0], row)}, ${label(names[1], column)}: ${cell.innerText.trim().replace("\n", " ")}${unit}${faint}${more}`;
  };
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  for (const grid of document.querySelectorAll("table.ip-grid")) {
    const at = (target) => target.closest("tbody td");
    grid.addEventListener("pointerover", (event) => tell(at(event.target)));
    grid.addEventListener("pointerleave", () => tell(null));
    grid.addEventListener("blur", () => tell(null));
    grid.tabIndex = 0;
    grid.setAttribute("aria-label", "heat map; the arrow keys go from cell to cell");
    grid.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return tell(null);
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const rows = grid.tBodies[0].rows;
      const inside = here && grid.contains(here);
      const row = rows[inside ? here.parentNode.sectionRowIndex + move[0] : 0];
      const next = row && row.cells[inside ? here.cellIndex + move[1] : 1];
      if (next && next.tagName === "TD") {
        tell(next);
        next.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
    });
  }

  // Tables: a button in each heading that has one; numbers by size, texts by letters, bars by length.
  const worth = (cell) => {
    const shown = text(cell);
    const number = parseFloat(shown.replace(/^[^\d+.-]+/, ""));
    const bar = cell && cell.querySelector("span[style]");
    if (!shown && bar) return bar.getBoundingClientRect().width;
    return /^[\s(]*[+-]?(\d|\.\d|inf|nan)/i.test(shown) ? (isNaN(number) ? -Infinity : number) : shown;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const table of document.querySelectorAll("table.ip-table")) {
    const body = table.tBodies[0];
    if (body.rows.length < 2) continue;
    for (const head of table.tHead.rows[0].cells) {
      if (!text(head)) continue;
      const button = document.createElement("button");
      button.className = "ip-sort";
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = [...body.rows].map((row) => [worth(row.cells[head.cellIndex]), row]);
        keyed.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
        body.append(...keyed.map((pair) => pair[1]));
      });
    }
  }

  // A search box: of the tables after it, rows that have all its words.
  for (const find of document.querySelectorAll("input.ip-find"))
    find.addEventListener("input", () => {
      const words = find.value.toLowerCase().split(/\s+/);
      for (const row of document.querySelectorAll(".ip-table tbody tr"))
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });

  // What scrolls is reached with the keyboard too.
  for (const part of document.querySelectorAll(".ip-scroll"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;

  // Folding is the browser's own; with Shift, one click folds or opens them all. Paper has no folds.
  const sections = [...document.querySelectorAll("details:has(> summary > h2)")];
  for (const one of sections)
    one.querySelector("summary").addEventListener("click", (event) => {
      if (!event.shiftKey) return;
      event.preventDefault();
      const open = !one.open;
      for (const other of sections) other.open = open;
    });
  addEventListener("beforeprint", () => sections.forEach((one) => (one.open = true)));
})();
