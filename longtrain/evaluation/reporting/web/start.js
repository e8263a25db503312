"use strict";
// Puts the page of one run together.

function headline() {
  const rows = full ?? run.systems[0];
  const count = rows.tasks.reduce((sum, task) => sum + task.rows, 0);
  const facts = [["target", run.target.name], ["precision", run.target.dtype], ["tasks", rows.tasks.length], ["examples", count.toLocaleString("en")], ["systems", run.systems.length], ["protocol", el("code", {}, run.protocol.hash)]];
  const toggle = el("button", { type: "button", class: "ghost", id: "theme", onclick: () => setTheme(theme() === "dark" ? "light" : "dark") }, "Light / dark");
  return el("header", { class: "top" },
    el("div", { class: "kicker" }, el("b", {}, "longtrain"), el("span", {}, `evaluation \u00b7 ${run.suite}`), el("span", { class: "push" }, toggle)),
    el("h1", {}, run.title),
    el("div", { class: "facts" }, facts.filter(([, value]) => known(value)).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, typeof value === "number" ? String(value) : value)))),
    run.notes.length > 0 && el("div", { class: "loud", role: "note" }, el("b", {}, "Read these figures with care"), el("ul", {}, run.notes.map((note) => el("li", {}, note)))));
}

const card = (id, name, big, ...about) => el("div", { class: "card figure", id }, el("div", { class: "name" }, name), el("div", { class: "big" }, big), el("div", { class: "about" }, about));

/** How the full cache's score compares with a recorded one, in words. */
const BASELINE = {
  equal: "as it was recorded", recorded: "recorded for later runs", none: "nothing recorded to compare it with",
  off: "not compared with the recorded value, as asked",
};

function overview() {
  const cards = [];
  const plain = scaleName !== ACCEPTANCE;
  const evicting = run.systems.filter((system) => plain && known(system.budget) && has(system.versus_full?.difference));
  if (full && plain && has(full.average)) cards.push(card("card-full", full.tasks.length > 1 ? `Full cache, average ${scaleName}` : `Full cache, ${scaleName}`, fixed(full.average.value), `95% interval ${range(full.average)}.${direction}`, el("div", {}, BASELINE[run.baseline?.status])));
  if (evicting.length) {
    const close = evicting.filter((system) => !(system.versus_full.larger_than_noise && !better(system.versus_full.difference.value)));
    close.sort((a, b) => (keptShare(a) ?? 1) - (keptShare(b) ?? 1));
    cards.push(close.length
      ? card("card-small", "Smallest cache within noise of full", percent(keptShare(close[0]), 0), "kept by ", el("b", {}, close[0].name), `, difference ${signed(close[0].versus_full.difference.value, 1)}`)
      : card("card-small", "Within noise of the full cache", "none", `every one of the ${evicting.length} systems that evict loses more than noise`));
  }
  const tau = (system) => (plain ? system.acceptance.tau : system.average).value;
  const drafts = run.systems.filter((system) => has(system.acceptance?.tau)).sort((a, b) => tau(b) - tau(a));
  if (drafts.length) {
    const [best] = drafts;
    cards.push(card("card-tau", "Longest acceptance \u03c4", fixed(tau(best)), el("b", {}, best.name), `, ${percent(best.acceptance.acceptance_rate.value, 0)} of drafts accepted`));
    const found = drafts.map(exactnessOf).filter(Boolean);
    const sum = (key) => found.reduce((total, one) => total + one[key], 0);
    if (found.length) cards.push(card("card-exact", "Drafted texts equal to plain decoding", `${sum("compared") - sum("different")} / ${sum("compared")}`, sum("different") ? "the rest may be rounding; see results.json" : "token for token"));
  }
  const fast = timed().filter((row) => row.name !== full?.name && known(row.ratio)).sort((a, b) => b.ratio - a.ratio)[0];
  if (fast) cards.push(card("card-speed", "Most tokens a second", fixed(fast.tokens_per_s, 1), el("b", {}, fast.name), `, ${ratioOf(fast)} of plain decoding${onCpu() ? "; a CPU says nothing about speed" : ""}`));
  return cards.length ? el("div", { class: "cards" }, cards) : null;
}

function systemsSection() {
  const { table, search } = systemsTable();
  return section("systems", "Systems", scored && `Bold differences from the full cache are larger than noise: their ${100 * run.bootstrap.confidence}% interval over the same examples, six or more, leaves out 0.`,
    overview(), el("div", { class: "controls", style: "margin-top:16px" }, search), table);
}

function tasksSection() {
  const options = [];
  if (scored) options.push(["score", `${scaleName}s`]);
  if (scored && run.systems.some((system) => system.versus_full)) options.push(["versus", "difference from full"]);
  if (drafted && scaleName !== ACCEPTANCE) options.push(["tau", "acceptance \u03c4"]);
  if (!options.length) return null;
  const place = el("div"), search = el("span");
  const show = (what) => { const made = taskMatrix(what); place.replaceChildren(made.table); search.replaceChildren(made.search); };
  show(options[0][0]);
  const own = ownTable(), figures = figuresTable(), rivals = rivalsTable();
  return section("tasks", "Tasks", `Point at a figure for its interval.${scored ? " Bold and coloured: differs from the full cache by more than noise." : ""}`,
    el("div", { class: "controls" }, options.length > 1 && segments(options, options[0][0], show), search), place,
    own && [el("h3", { class: "under" }, own.title), own.table],
    figures && [el("h3", { class: "under" }, "Further figures"), figures],
    rivals && [el("h3", { class: "under" }, "Differences over the same prompts"), rivals]);
}

/** Systems that were timed, one entry for each task or length. */
const timed = () => (page.timings?.speed ?? []).flatMap((row) => Object.entries(row.figures).map(([name, figures]) => ({ ...row, ...figures, name })));
const onCpu = () => String(page.timings?.device).startsWith("cpu");
function ratioOf(row) {
  const [low, high] = row.ratio_range ?? [null, null];
  return known(low) && low !== high ? `${fixed(row.ratio, 2)} \u00d7 (${fixed(low, 2)} to ${fixed(high, 2)})` : `${fixed(row.ratio, 2)} \u00d7`;
}

function timesSection() {
  const rows = timed();
  if (!rows.length) return null;
  const number = (key, name, digits, title) => rows.some((row) => known(row[key])) && { name, title, value: (row) => row[key], cell: (row) => fixed(row[key], digits) };
  const columns = [{ name: "system", left: true, value: (row) => row.name, cell: (row) => systemLabel(row.name) },
    { name: "task", left: true, value: (row) => row.task, cell: (row) => row.task },
    rows.some((row) => known(row.length)) && { name: "context", value: (row) => row.length, cell: (row) => (known(row.length) ? tokens(row.length) : "\u2013") },
    number("tokens_per_s", "tokens/s", 1, "Output tokens a second, the prompt\u2019s time left out"),
    rows.some((row) => known(row.ratio)) && { name: "ratio", title: "To the full cache without a draft; in brackets the smallest and the largest of a batch", value: (row) => row.ratio, cell: (row) => (known(row.ratio) ? ratioOf(row) : "\u2013") },
    number("end_to_end_tokens_per_s", "with prompt", 1, "Output tokens a second, the prompt\u2019s time included"),
    number("max_new_tokens", "output tokens", 0, "Asked for"), number("prompts", "prompts", 0), number("batch", "batch", 0)].filter(Boolean);
  return section("speed", "Speed", `Measured on ${page.timings.device}; systems took turns on every batch.${onCpu() ? " Other work and the number of threads change the times of a CPU by a factor from run to run: these figures say nothing about speed on a GPU." : ""}`, sortable(columns, rows, { id: "times", filter: false, label: "Speed" }).table);
}

function deep(name, value) {
  if (value !== null && typeof value === "object") {
    const flat = Object.entries(value).map(([key, inner]) => (Array.isArray(value) ? "" : `${key} `) + (known(inner) && typeof inner === "object" ? JSON.stringify(inner) : inner)).join(", ");
    if (flat.length <= 90) return [el("dt", {}, name), el("dd", {}, visible(flat))];
    const size = Array.isArray(value) ? plural(value.length, "item") : plural(Object.keys(value).length, "key");
    return [el("dt", {}, name), el("dd", {}, el("details", { class: "deep" }, el("summary", { class: "soft" }, size), el("pre", {}, visible(JSON.stringify(value, null, 2)))))];
  }
  return [el("dt", {}, name), el("dd", {}, typeof value === "string" && /^[0-9a-f]{12,}$/.test(value) ? el("code", {}, value) : String(value))];
}

function protocolSection() {
  const boot = run.bootstrap;
  const extras = run.systems.filter((system) => system.extra && Object.keys(system.extra).length).map((system) => deep(`more of ${system.name}`, system.extra));
  const facts = run.systems.filter((system) => system.facts && Object.keys(system.facts).length).map((system) => deep(system.name, system.facts));
  return section("protocol", "Protocol", "Results can be compared only where this hash is the same: prompts, truncation, template, decoding and scoring follow from it.",
    el("div", { class: "pair" },
      el("div", { class: "card figure" }, el("div", { class: "name" }, "Protocol hash"), el("div", { class: "hash" }, run.protocol.hash),
        el("dl", { style: "margin-top:12px" }, Object.entries(run.target).filter(([, value]) => known(value)).map(([name, value]) => deep(`target ${name}`.replaceAll("_", " "), value)),
          deep("bootstrap", `${boot.resamples} resamples of examples, seed ${boot.seed}, ${100 * boot.confidence}%`),
          run.baseline && Object.entries(run.baseline).filter(([, value]) => known(value)).map(([name, value]) => deep(`baseline ${name}`.replaceAll("_", " "), value)))),
      el("div", { class: "card figure" }, el("div", { class: "name" }, "Settings that were hashed"), el("dl", { style: "margin-top:6px" }, Object.entries(run.protocol.settings).map(([name, value]) => deep(name.replaceAll("_", " "), value))))),
    (facts.length + extras.length) > 0 && el("div", { class: "card figure", style: "margin-top:14px" }, el("div", { class: "name" }, "Systems, as they ran"), el("dl", { style: "margin-top:6px" }, facts, extras)));
}

function start() {
  const drawings = plots();
  const halves = drawings.map((plot) => plot.card).filter((one) => !one.classList.contains("wide"));
  if (halves.length % 2) halves[halves.length - 1].classList.add("wide"); // no empty half of a line
  const sections = [systemsSection(), drawings.length && section("plots", "Plots", null, el("div", { class: "plots" }, drawings.map((plot) => plot.card))),
    tasksSection(), timesSection(), examplesSection(), protocolSection()].filter(Boolean);
  const links = sections.map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent));
  const app = document.getElementById("app");
  app.append(el("div", { class: "wrap" }, headline()), el("nav", { class: "bar", "aria-label": "Sections" }, el("div", { class: "wrap" }, links)),
    el("main", { class: "wrap", id: "main" }, sections), el("footer", { class: "wrap" }, "Intervals: percentile bootstrap over examples, within each task. \u03c4: tokens a target forward, its own included, the prompt\u2019s not. This page needs no network; results.json, table.md and examples.jsonl lie beside it."));
  drawings.forEach((plot) => plot.start());
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) links.forEach((link) => link.classList.toggle("here", link.hash === `#${entry.target.id}`));
  }), { rootMargin: "-20% 0px -70% 0px" });
  sections.forEach((one) => seen.observe(one));
  document.documentElement.dataset.ready = "true";
}
start();
