"use strict";
// Puts the page of a comparison of two runs together.

const [first, second] = run.runs.map((one) => one.label);
const gap = (one) => one?.difference.value;

function pairsTable() {
  const averages = run.pairs.map((pair) => pair.average.difference).filter(has);
  const reach = Math.max(1e-9, ...averages.flatMap((one) => ends(one).map(Math.abs)));
  const figure = (pair, side) => (has(pair.average[side]) ? [el("b", {}, fixed(pair.average[side].value)), el("span", { class: "range" }, range(pair.average[side]))] : "\u2013");
  const columns = [
    { name: "system", left: true, value: (pair) => pair.name, cell: (pair) => el("span", { class: "sys" }, el("span", {}, breakable(pair.name))) },
    { name: `${scaleName}, ${first}`, value: (pair) => pair.average.first.value, cell: (pair) => figure(pair, "first") },
    { name: `${scaleName}, ${second}`, value: (pair) => pair.average.second.value, cell: (pair) => figure(pair, "second") },
    { name: "difference", title: "The second minus the first over the same examples, mean over tasks; bold where larger than noise", value: (pair) => gap(pair.average),
      cell: (pair) => has(pair.average.difference) ? [difference(pair.average), el("span", { class: "range" }, range(pair.average.difference)), whisker(pair.average.difference, -reach, reach, "")] : "\u2013" },
  ];
  if (run.pairs.some((pair) => pair.acceptance)) columns.push({ name: "difference of \u03c4", value: (pair) => gap(pair.acceptance), cell: (pair) => difference(pair.acceptance) });
  columns.push({ name: "examples", minor: true, value: (pair) => pair.examples, cell: (pair) => String(pair.examples) });
  return sortable(columns, run.pairs, { id: "pairs", label: "Filter systems" });
}

function pairTasks() {
  const names = unique(run.pairs.flatMap((pair) => pair.tasks.map((task) => task.task)));
  const score = (pair, name) => pair.tasks.find((task) => task.task === name)?.score;
  const columns = [{ name: "system", left: true, value: (pair) => pair.name, cell: (pair) => el("span", { class: "sys" }, el("span", {}, breakable(pair.name))) },
    ...names.map((name) => ({ name, value: (pair) => gap(score(pair, name)), cell: (pair) => difference(score(pair, name)) }))];
  return sortable(columns, run.pairs, { id: "pair-tasks", label: "Filter systems" });
}

function comparison() {
  const toggle = el("button", { type: "button", class: "ghost", id: "theme", onclick: () => setTheme(theme() === "dark" ? "light" : "dark") }, "Light / dark");
  const pairs = pairsTable(), tasks = pairTasks();
  const about = `Difference: ${second} minus ${first}, over the examples that both have. Bold and coloured: larger than noise, that is, its ${100 * run.bootstrap.confidence}% interval leaves out 0.${direction}`;
  document.getElementById("app").append(
    el("div", { class: "wrap" }, el("header", { class: "top" },
      el("div", { class: "kicker" }, el("b", {}, "longtrain"), el("span", {}, `comparison \u00b7 ${run.suite}`), el("span", { class: "push" }, toggle)),
      el("h1", {}, `${first} and ${second}`),
      el("div", { class: "facts" }, run.runs.map((one) => el("span", {}, `${one.label}: `, el("b", {}, one.title), ` on ${one.target.name}, ${one.target.dtype}`)), el("span", {}, "protocol ", el("code", {}, run.protocol.hash))),
      run.notes.length > 0 && el("div", { class: "loud", role: "note" }, el("b", {}, "Read these figures with care"), el("ul", {}, run.notes.map((note) => el("li", {}, note)))))),
    el("main", { class: "wrap", id: "main" },
      section("systems", "Systems", about, el("div", { class: "controls" }, pairs.search), pairs.table),
      section("tasks", "Differences by task", "Point at a figure for its interval.", el("div", { class: "controls" }, tasks.search), tasks.table)),
    el("footer", { class: "wrap" }, `Intervals: percentile bootstrap over examples drawn in pairs within each task, ${run.bootstrap.resamples} resamples, seed ${run.bootstrap.seed}.`));
  document.documentElement.dataset.ready = "true";
}
comparison();
