"use strict";
// A click on a heading sorts its table: largest number first, then the other way round; dashes stay last.

function sortBy(table, column, heading) {
  const down = heading.getAttribute("aria-sort") !== "descending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const cell = row.children[column];
    const text = cell.textContent.trim();
    if (text === "-") return null;
    return cell.dataset.value === undefined ? text : Number(cell.dataset.value);
  };
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  table.tBodies[0].replaceChildren(...rows);
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    heading.addEventListener("click", () => sortBy(table, column, heading));
  });
}
