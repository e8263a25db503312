"use strict";
// Puts the page of many finished evaluations together.

/** A table whose rows are lists of texts; a cell sorts by the number that it begins with. */
function listed(header, rows, id) {
  const sorted = (text) => { const found = parseFloat(String(text).replace(/,/g, "")); return Number.isNaN(found) ? null : found; };
  const columns = header.map((name, at) => ({ name, left: at === 0, value: (row) => (at === 0 ? row[0] : sorted(row[at]) ?? row[at]), cell: (row) => (at === 0 ? breakable(row[0]) : row[at]) }));
  return sortable(columns, rows, { id, label: "Filter rows" });
}

function boardOf(group) {
  const { table, search } = listed(group.header, group.rows, `group-${group.number}`);
  const about = `suite=${group.suite}, protocol ${group.protocol}; ${group.scale}, ${group.higher_is_better ? "higher" : "lower"} is better.`;
  const notes = group.notes.length > 0 && el("div", { class: "loud", role: "note" }, el("ul", {}, group.notes.map((note) => el("li", {}, note))));
  return section(`board-${group.number}`, `${group.number}. ${group.title}: ${group.target}, ${group.dtype}`, about, el("div", { class: "controls" }, search), table, notes);
}

const toggle = el("button", { type: "button", class: "ghost", id: "theme", onclick: () => setTheme(theme() === "dark" ? "light" : "dark") }, "Light / dark");
const evaluation = (one) => el("li", {}, el("b", {}, one.run), ` ${["commit", "machine", "at"].map((key) => one[key]).filter(Boolean).join(", ")}`, el("br"), el("code", { style: "overflow-wrap: anywhere" }, one.command));
document.getElementById("app").append(
  el("div", { class: "wrap" }, el("header", { class: "top" },
    el("div", { class: "kicker" }, el("b", {}, "longtrain"), el("span", { class: "push" }, toggle)), el("h1", {}, "Leaderboard"),
    el("div", { class: "facts" }, el("span", {}, run.said)))),
  el("main", { class: "wrap", id: "main" },
    run.groups.map(boardOf),
    run.apart.length > 0 && section("apart", "What may not be compared", null,
      el("ul", {}, run.apart.map((one) => el("li", {}, `${one.first} and ${one.second}: ${one.because.join("; ")}`)))),
    section("evaluations", "Evaluations", null, el("ul", {}, run.runs.map(evaluation)))));
document.documentElement.dataset.ready = "true";
