"use strict";
// Sortable, filterable tables.

const classOf = (column) => [column.left && "left", column.minor && "minor"].filter(Boolean).join(" ") || null;

/**
 * A table whose heads sort and whose rows a text filters.
 * columns: {name, title, left, minor (not on a phone), value(row) to sort by, cell(row) -> node or text}; the first
 * names the row.
 */
function sortable(columns, rows, { id, filter = true, label = "Filter rows" } = {}) {
  let by = null, down = true, wanted = "";
  const body = el("tbody");
  const heads = columns.map((column, place) =>
    el("th", { scope: "col", class: classOf(column), "aria-sort": "none", title: column.title },
      el("button", { type: "button", onclick: () => sort(place) }, column.name)));
  const made = rows.map((row) => ({
    row,
    text: String(columns[0].value(row)).toLowerCase(),
    node: el("tr", {}, columns.map((column) => el("td", { class: classOf(column) }, column.cell(row)))),
  }));
  function sort(place) {
    const first = typeof rows.map(columns[place].value).find(known) === "number"; // numbers: largest first
    down = by === place ? !down : first;
    by = place;
    heads.forEach((head, at) => head.setAttribute("aria-sort", at !== by ? "none" : down ? "descending" : "ascending"));
    show();
  }
  function show() {
    const shown = made.filter((one) => one.text.includes(wanted));
    if (by !== null) {
      const value = columns[by].value;
      shown.sort((a, b) => {
        const [x, y] = [value(a.row), value(b.row)];
        if (!known(x) || !known(y)) return known(y) - known(x); // what has no figure stands last
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
    }
    body.replaceChildren(...shown.map((one) => one.node));
    if (!shown.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "empty" }, "No row has this text.")));
  }
  show();
  const search = el("input", { type: "search", placeholder: label, "aria-label": label, oninput: () => { wanted = search.value.toLowerCase(); show(); } });
  const table = el("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": label },
    el("table", { id }, el("thead", {}, el("tr", {}, heads)), body));
  return { table, search: filter ? search : null };
}

const exactText = (found) => !found ? null
  : found.different === 0 ? `${found.compared} the same` : `${found.different} of ${found.compared} differ`;

function exactnessOf(system) {
  const all = system.tasks.map((task) => task.exactness).filter(Boolean);
  if (!all.length) return null;
  const sum = (key) => all.reduce((total, one) => total + one[key], 0);
  return { compared: sum("compared"), different: sum("different") };
}
function keptShare(system) {
  const shares = system.tasks.map((task) => task.kept_share).filter(known);
  return shares.length ? shares.reduce((a, b) => a + b, 0) / shares.length : null;
}
const scored = run.systems?.some((system) => has(system.average));
const drafted = run.systems?.some((system) => system.acceptance);

function systemsTable() {
  const averages = run.systems.map((system) => system.average).filter(has);
  const [low, high] = [Math.min(...averages.map((a) => ends(a)[0])), Math.max(...averages.map((a) => ends(a)[1]))];
  const columns = [{ name: "system", left: true, value: (s) => s.name, cell: (s) => systemLabel(s.name) },
    { name: "kind", left: true, minor: true, value: (s) => s.kind, cell: (s) => el("span", { class: "tag" }, s.kind) },
    { name: "budget", minor: true, title: "Rows of the prompt that stay in the cache, as asked for", value: (s) => (known(s.budget) ? parseFloat(s.budget) : null), cell: (s) => s.budget ?? "\u2013" }];
  if (scored) {
    columns.push({ name: run.systems[0].tasks.length > 1 ? `average ${scaleName}` : scaleName, title: `Mean over tasks, 95% bootstrap interval over examples.${direction}`, value: (s) => s.average.value,
      cell: (s) => [has(s.average) ? [el("b", {}, fixed(s.average.value)), el("span", { class: "range" }, range(s.average)), whisker(s.average, low, high, s.family)] : "\u2013"] });
    columns.push({ name: "vs full", title: "Difference from the full cache over the same examples; bold where larger than noise", value: (s) => s.versus_full?.difference.value,
      cell: (s) => s.kind === "full" ? el("span", { class: "faint" }, "reference") : [difference(s.versus_full), has(s.versus_full?.difference) && el("span", { class: "range" }, range(s.versus_full.difference))] });
  }
  if (run.systems.some((s) => known(keptShare(s)) && s.budget)) {
    columns.push({ name: "cache kept", title: "Share of the prompt's rows in the cache while decoding, mean over tasks", value: keptShare, cell: (s) => percent(keptShare(s)) });
  }
  if (drafted) {
    if (scaleName !== ACCEPTANCE) columns.push({ name: "\u03c4", title: "Acceptance length: tokens a target forward, its own included", value: (s) => s.acceptance?.tau.value,
      cell: (s) => s.acceptance ? el("b", { title: `95% interval ${range(s.acceptance.tau, 2)}` }, fixed(s.acceptance.tau.value)) : "\u2013" });
    columns.push({ name: "accepted", title: "Accepted drafts over drafted levels", value: (s) => s.acceptance?.acceptance_rate.value, cell: (s) => percent(s.acceptance?.acceptance_rate.value) });
    columns.push({ name: "drafted texts", left: true, title: "Texts compared with the same cache without a draft", value: (s) => exactnessOf(s)?.different, cell: (s) => exactText(exactnessOf(s)) ?? "\u2013" });
  }
  const judged = run.systems.some((s) => s.tasks.some((task) => task.unjudged));
  if (judged && scored) {
    const count = (s) => s.tasks.reduce((sum, task) => sum + task.unjudged, 0);
    columns.push({ name: "unjudged", title: "Answers without a score", value: count, cell: (s) => String(count(s)) });
  }
  return sortable(columns, run.systems, { id: "systems", label: "Filter systems" });
}

/** Figures that only this suite has (`extra.table`): a title, and a number a column. */
function ownTable() {
  const own = (system) => system.extra?.table;
  const systems = run.systems.filter(own);
  if (!systems.length) return null;
  const names = unique(systems.flatMap((system) => Object.keys(own(system).columns)));
  const columns = [{ name: "system", left: true, value: (s) => s.name, cell: (s) => systemLabel(s.name) },
    ...names.map((name) => ({ name, value: (s) => own(s).columns[name] ?? null, cell: (s) => fixed(own(s).columns[name]) }))];
  return { title: own(systems[0]).title, ...sortable(columns, systems, { id: "own", filter: false, label: own(systems[0]).title }) };
}

/** What the suite reports beside its score: a line for each system and task. */
function figuresTable() {
  const rows = run.systems.flatMap((system) => system.tasks.filter((task) => Object.keys(task.figures ?? {}).length).map((task) => ({ system, task })));
  const used = (run.figures ?? []).filter((figure) => rows.some((row) => has(row.task.figures[figure.name])));
  if (!used.length) return null;
  const shown = (figure, one) => !has(one) ? "\u2013" : figure.unit === "percent" ? percent(one.value) : figure.unit === "bytes" ? `${fixed(one.value / 1e6)} MB` : fixed(one.value, 3);
  const columns = [{ name: "system", left: true, value: (row) => row.system.name, cell: (row) => systemLabel(row.system.name) },
    { name: "task", left: true, value: (row) => row.task.task, cell: (row) => row.task.task },
    ...used.map((figure) => ({ name: figure.name, value: (row) => row.task.figures[figure.name]?.value,
      cell: (row) => el("span", { title: has(row.task.figures[figure.name]) ? range(row.task.figures[figure.name], 3) : null }, shown(figure, row.task.figures[figure.name])) }))];
  return sortable(columns, rows, { id: "figures", filter: false, label: "Further figures" }).table;
}

/** Differences between systems over the same prompts. */
function rivalsTable() {
  if (!(run.differences ?? []).length) return null;
  const columns = [{ name: "system", left: true, value: (one) => one.first, cell: (one) => systemLabel(one.first) },
    { name: "minus", left: true, value: (one) => one.second, cell: (one) => systemLabel(one.second) },
    { name: "task", left: true, value: (one) => one.task, cell: (one) => one.task },
    { name: "difference", value: (one) => one.score.difference.value, cell: (one) => [difference(one.score, 3), el("span", { class: "range" }, range(one.score.difference, 3))] }];
  return sortable(columns, run.differences, { id: "rivals", filter: false, label: "Differences over the same prompts" }).table;
}

/** Systems by tasks: scores, differences from the full cache, or acceptance lengths. */
function taskMatrix(what) {
  const names = unique(run.systems.flatMap((system) => system.tasks.map((task) => task.task)));
  const task = (system, name) => system.tasks.find((one) => one.task === name);
  const figure = {
    score: [(t) => t?.score.value, (t) => has(t?.score) ? scoreCell(t) : "\u2013"],
    versus: [(t) => t?.versus_full?.difference.value, (t) => difference(t?.versus_full)],
    tau: [(t) => t?.acceptance?.tau.value, (t) => t?.acceptance ? el("span", { title: range(t.acceptance.tau, 2) }, fixed(t.acceptance.tau.value)) : "\u2013"],
  }[what];
  const columns = [{ name: "system", left: true, value: (s) => s.name, cell: (s) => systemLabel(s.name) },
    ...names.map((name) => ({ name, value: (s) => figure[0](task(s, name)), cell: (s) => figure[1](task(s, name)) }))];
  const systems = what === "tau" ? run.systems.filter((s) => s.acceptance) : what === "versus" ? run.systems.filter((s) => s.versus_full) : run.systems;
  return sortable(columns, systems, { id: `tasks-${what}`, label: "Filter systems" });
}
function scoreCell(task) {
  const versus = task.versus_full;
  const kind = versus?.larger_than_noise ? (better(versus.difference.value) ? "better" : "worse") : null;
  const unjudged = task.unjudged ? `; ${task.unjudged} without a score` : "";
  const title = `${fixed(task.score.value, 3)} ${range(task.score, 2)}, ${plural(task.score.n, "example")}${unjudged}` +
    (known(task.official) ? `; the benchmark's own rounding: ${task.official}` : "");
  return el("span", { class: kind, title }, fixed(task.score.value));
}
