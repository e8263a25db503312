"use strict";
// Plots. Each is drawn from the results with the colours of the present theme, and again when it changes.

const QUIET = { displayModeBar: false, responsive: true };

function layout(x, y, more = {}) {
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), tickfont: { size: 12 }, automargin: true, fixedrange: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--sans"), size: 13, color: css("--soft") },
    margin: { l: 8, r: 10, t: 12, b: 8 }, hovermode: "closest",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), family: css("--sans") } },
    xaxis: { ...axis, title: { text: x, standoff: 8, font: { size: 12.5 } }, ...more.x },
    yaxis: { ...axis, title: { text: y, standoff: 8, font: { size: 12.5 } }, ...more.y },
    shapes: more.shapes ?? [], annotations: more.annotations ?? [], bargap: 0.35,
  };
}

const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up"];

/**
 * A line with error bars; points without a figure are left out.
 * points: [place, interval, what the place is called]. Systems of one family share a colour: `style` tells them apart.
 */
function line(name, family, points, { style = 0, percents = false } = {}) {
  const there = points.filter(([, interval]) => has(interval));
  const intervals = there.map(([, interval]) => interval);
  const ink = colour(family);
  return {
    type: "scatter", mode: "lines+markers", name: label(name), x: there.map(([at]) => at), y: intervals.map((i) => i.value),
    error_y: { type: "data", symmetric: false, array: intervals.map((i) => ends(i)[1] - i.value), arrayminus: intervals.map((i) => i.value - ends(i)[0]), thickness: 1.1, width: 3, color: ink },
    line: { color: ink, width: 2.2, dash: DASHES[style % 4] }, marker: { color: ink, size: 7.5, symbol: SYMBOLS[style % 4], line: { color: css("--card"), width: 1.5 } },
    customdata: there.map(([at, interval, called]) => [percents && known(interval.low) ? `[${percent(interval.low)}, ${percent(interval.high)}]` : range(interval, 2), interval.n, label(called ?? at)]),
    hovertemplate: `<b>%{fullData.name}</b><br>%{customdata[2]}: %{y:${percents ? ".1%" : ".2f"}} %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>`, showlegend: false,
  };
}
/** The place of system number `at` of `count` beside a point, so that equal figures do not hide each other. */
const aside = (at, count) => (count < 2 ? 0 : (at / (count - 1) - 0.5) * Math.min(0.5, 0.12 * count));
/** How many systems of its family come after one: the last, of the largest budget, has the solid line. */
const nth = (system) => { const same = run.systems.filter((other) => other.family === system.family); return same.length - 1 - same.indexOf(system); };

/**
 * A card that holds one plot; `build(shown)` gives [traces, layout] for the present theme and the names that are on.
 * names: [name, family] pairs, buttons below the plot that show and hide; `on` are those shown at first.
 */
function plotCard(id, title, note, build, { names = [], on = names.map(([name]) => name), control = null, wide = false, height = null } = {}) {
  const canvas = el("div", { class: "canvas", id, role: "img", "aria-label": title });
  if (height) canvas.style.minHeight = `${height}px`;
  const shown = new Set(on);
  const paint = () => { const [data, made] = build(shown); Plotly.react(canvas, data, made, QUIET); };
  const card = el("div", { class: wide ? "card plot wide" : "card plot" },
    el("div", { class: "title" }, el("h3", {}, title), control), note && el("p", { class: "note" }, note), canvas, names.length > 0 && switches(names, shown, paint));
  return { card, paint, start: () => drawn(paint) };
}

/** Buttons that put names into the set `shown` and out of it. */
function switches(names, shown, changed) {
  return el("div", { class: "chips keys" }, names.map(([name, family]) => {
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(shown.has(name)), onclick: () => {
      if (!shown.delete(name)) shown.add(name);
      chip.setAttribute("aria-pressed", String(shown.has(name)));
      changed();
    } }, dot(family), el("span", {}, breakable(name)));
    return chip;
  }));
}

/** Plotly reads <b> and the like in its labels: names from outside must not be read so. */
const label = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const entry = (system, task) => (task === "" ? system.average : system.tasks.find((one) => one.task === task)?.score);
const full = run.systems?.find((system) => system.kind === "full");

function budgetPlot() {
  const evicting = run.systems.filter((system) => known(system.budget) && counts(system));
  const budgets = unique(evicting.map((system) => system.budget)).sort((a, b) => parseFloat(a) - parseFloat(b));
  if (!scored || !evicting.length) return null;
  const names = unique(run.systems.flatMap((system) => system.tasks.map((task) => task.task)));
  let task = "";
  const place = (budget, number) => budgets.indexOf(budget) + 0.3 * aside(number, lines.length);
  const lines = families.filter((family) => evicting.some((system) => system.family === family));
  const note = `Rows of the prompt that stay in the cache. The band is the full cache\u2019s 95% interval.${direction}`;
  const plot = plotCard("plot-budget", `${capital(scaleName)} against budget`, note, (shown) => {
    const data = lines.filter((family) => shown.has(family)).map((family) => line(family, family, evicting.filter((system) => system.family === family)
      .sort((a, b) => parseFloat(a.budget) - parseFloat(b.budget))
      .map((system) => [place(system.budget, lines.indexOf(family)), entry(system, task), `budget ${system.budget}`]), { style: family.includes("+") ? 2 : 0 }));
    const reference = full && entry(full, task), shapes = [];
    if (has(reference)) {
      const across = { xref: "paper", x0: 0, x1: 1, layer: "below" };
      shapes.push({ ...across, type: "rect", y0: ends(reference)[0], y1: ends(reference)[1], fillcolor: css("--band"), line: { width: 0 } });
      shapes.push({ ...across, type: "line", y0: reference.value, y1: reference.value, line: { color: css("--ink"), width: 1.5, dash: "dash" } });
    }
    const annotations = has(reference) ? [{ xref: "paper", x: 1, xanchor: "right", y: reference.value, yanchor: "bottom", text: `full cache ${fixed(reference.value)}`, showarrow: false, font: { size: 12, color: css("--ink") } }] : [];
    const x = { tickvals: budgets.map((_, at) => at), ticktext: budgets, range: [-0.3, budgets.length - 0.7], zeroline: false };
    return [data, layout("budget, rows", task === "" ? `average ${scaleName}` : scaleName, { x, shapes, annotations })];
  }, { names: lines.map((family) => [family, family]), control: names.length > 1 && select([["", "average"], ...names.map((name) => [name, name])], "", (chosen) => { task = chosen; plot.paint(); }, "Task of the budget plot") });
  return plot;
}

function averagePlot() {
  const systems = run.systems.filter((system) => has(system.average) && counts(system));
  if (systems.length < 2) return null;
  return plotCard("plot-average", systems[0].tasks.length > 1 ? `Average ${scaleName}` : `The ${scaleName}`, `With 95% intervals; ordered by value.${direction}`, () => {
    const up = [...systems].sort((a, b) => (a.average.value - b.average.value) * (run.scale.higher_is_better ? 1 : -1));
    const of = (get) => up.map((system) => get(system.average));
    return [
      [{
        type: "bar", orientation: "h", y: up.map((system) => label(system.name)), x: of((a) => a.value),
        marker: { color: up.map((system) => colour(system.family)), opacity: 0.85, cornerradius: 4 },
        error_x: { type: "data", symmetric: false, array: of((a) => ends(a)[1] - a.value), arrayminus: of((a) => a.value - ends(a)[0]), color: css("--ink"), thickness: 1.2, width: 3 },
        customdata: of((a) => [range(a, 2), a.n]), hovertemplate: "<b>%{y}</b><br>%{x:.2f} %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>",
      }],
      layout("", "", { x: { rangemode: "tozero" }, y: { tickfont: { size: 11.5 }, ticksuffix: " ", tickvals: up.map((system) => label(system.name)), ticktext: up.map((system) => label(short(system.name))) } }),
    ];
  }, { height: Math.max(300, 60 + 23 * systems.length) });
}

const facetsOf = (system, name) => (system.facets ?? []).filter((one) => one.facet === name);
/** Lines over one facet; of many systems those most worth seeing come first, the others on request. */
function facetPlot(id, title, note, facet, key, axis) {
  const systems = run.systems.filter((system) => facetsOf(system, facet).some((one) => has(one[key])));
  const values = ordered(systems.flatMap((system) => facetsOf(system, facet).map((one) => one.value)));
  if (values.length < 2) return null;
  const numbers = values.every((value) => typeof value === "number");
  const named = (value) => (facet === "length" ? `${tokens(value)} tokens` : `${facet} ${value}`);
  const ticks = values.map((value) => label(facet === "length" ? tokens(value) : value));
  return plotCard(id, title, note, (shown) => {
    const visible = systems.filter((system) => shown.has(system.name));
    const data = visible.map((system, number) => {
      const points = facetsOf(system, facet).map((one) => [values.indexOf(one.value) + 0.3 * aside(number, visible.length), one[key], named(one.value)]);
      return { ...line(system.name, system.family, points, { style: nth(system) }), mode: numbers ? "lines+markers" : "markers" };
    });
    const x = { tickvals: values.map((_, at) => at), ticktext: ticks, range: [-0.35, values.length - 0.65], zeroline: false };
    return [data, layout(facet === "length" ? "context length, tokens" : facet, axis, { x })];
  }, { names: systems.map((system) => [system.name, system.family]), on: fewOf(systems).map((system) => system.name) });
}
/** At most six systems to begin with: the full cache, then each family's largest budget. */
function fewOf(systems) {
  const last = {};
  for (const system of systems) last[system.family] = system;
  return systems.filter((system) => system.kind === "full" || last[system.family] === system).slice(0, 6);
}

function depthPlot() {
  const systems = run.systems.filter((system) => system.acceptance?.by_depth.some((row) => row.tried));
  if (!systems.length) return null;
  return plotCard("plot-depth", "Acceptance by depth of the draft", "Share accepted where the token before it was; 95% Wilson intervals.", (shown) => {
    const visible = systems.filter((system) => shown.has(system.name));
    const data = visible.map((system, number) => line(system.name, system.family, system.acceptance.by_depth.filter((row) => row.tried)
      .map((row) => [row.depth + 0.3 * aside(number, visible.length), row.rate, `depth ${row.depth}`]), { style: nth(system), percents: true }));
    return [data, layout("depth of the drafted token", "accepted", { x: { dtick: 1, zeroline: false }, y: { range: [0, 1.02], tickformat: ".0%" } })];
  }, { names: systems.map((system) => [system.name, system.family]), on: fewOf(systems).map((system) => system.name) });
}

function positionPlot() {
  const systems = run.systems.filter((system) => system.acceptance?.by_position.filter((row) => has(row.tau)).length > 1);
  if (!systems.length) return null;
  return plotCard("plot-position", "Acceptance by place in the output", "Acceptance length \u03c4 of the cycles that begin there.", (shown) => {
    const visible = systems.filter((system) => shown.has(system.name));
    const data = visible.map((system, number) => line(system.name, system.family, system.acceptance.by_position
      .map((row) => [(row.from + row.below) / 2 + 0.3 * aside(number, visible.length) * (row.below - row.from), row.tau, `tokens ${row.from} to ${row.below - 1}`]), { style: nth(system) }));
    return [data, layout("generated token", "acceptance length \u03c4", { x: { rangemode: "tozero", zeroline: false } })];
  }, { names: systems.map((system) => [system.name, system.family]), on: fewOf(systems).map((system) => system.name) });
}

/** One heat map a system over length and depth; other facets and tasks are chosen above. */
function needleMaps() {
  const cells = (run.cells ?? []).filter((cell) => known(cell.facets.length) && known(cell.facets.depth) && has(cell.score));
  const keyOf = (cell) => [cell.task, ...Object.entries(cell.facets).filter(([name]) => !["length", "depth"].includes(name)).map(([name, value]) => `${name} ${value}`)].join(" \u00b7 ");
  const keys = unique(cells.map(keyOf));
  if (!keys.length) return null;
  let chosen = keys[0];
  const names = run.systems.map((system) => system.name).filter((name) => cells.some((cell) => cell.system === name));
  const maximum = run.scale.maximum ?? Math.max(...cells.map((cell) => cell.score.value));
  const shown = new Set(fewOf(run.systems.filter((system) => names.includes(system.name))).map((system) => system.name));
  const boxes = names.map((name, place) => el("div", {}, el("h4", {}, systemLabel(name)), el("div", { class: "canvas", id: `plot-needle-${place}`, role: "img", "aria-label": `Needle map of ${name}` })));
  const paint = () => names.forEach((name, place) => {
    boxes[place].hidden = !shown.has(name);
    if (boxes[place].hidden) return;
    const inside = cells.filter((cell) => cell.system === name && keyOf(cell) === chosen);
    const lengths = ordered(inside.map((cell) => cell.facets.length)), depths = ordered(inside.map((cell) => cell.facets.depth));
    const find = (length, depth) => inside.find((cell) => cell.facets.length === length && cell.facets.depth === depth)?.score;
    const grid = depths.map((depth) => lengths.map((length) => find(length, depth)?.value ?? null));
    const few = lengths.length <= 6;
    Plotly.react(boxes[place].lastChild, [{
      type: "heatmap", x: lengths.map(tokens), y: depths.map(String), z: grid, zmin: 0, zmax: maximum, reversescale: !run.scale.higher_is_better, xgap: 2, ygap: 2, showscale: false,
      colorscale: [[0, css("--low")], [1, css("--high")]], text: grid.map((row) => row.map((value) => (known(value) ? String(Math.round(value)) : ""))),
      texttemplate: few ? "%{text}" : "", textfont: { size: 11 },
      customdata: depths.map((depth) => lengths.map((length) => { const found = find(length, depth); return found ? [range(found), found.n] : ["", 0]; })),
      hovertemplate: "%{x} tokens, depth %{y}%<br><b>%{z:.1f}</b> %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>",
    }], layout("context length, tokens", "depth, %", { x: { type: "category", showgrid: false }, y: { type: "category", autorange: "reversed", showgrid: false } }), QUIET);
  });
  const card = el("div", { class: "card plot wide" },
    el("div", { class: "title" }, el("h3", {}, "Needles by length and depth"), keys.length > 1 && select(keys.map((key) => [key, key]), chosen, (key) => { chosen = key; paint(); }, "Task of the needle maps")),
    el("p", { class: "note" }, `Mean ${scaleName} of each cell${known(run.scale.maximum) ? `, ${maximum} at most` : ""}, over where in the context the needle lies: depth 0 is its start.${direction}`),
    el("div", { class: "maps" }, boxes), names.length > 1 && switches(names.map((name) => [name, systemOf[name].family]), shown, paint));
  return { card, start: () => drawn(paint) };
}

function plots() {
  const others = unique((run.systems ?? []).flatMap((system) => (system.facets ?? []).map((one) => one.facet))).filter((name) => !["length", "depth"].includes(name));
  return [
    budgetPlot(), averagePlot(),
    scaleName !== ACCEPTANCE && facetPlot("plot-tau-length", "Acceptance against context length", "Acceptance length \u03c4 with 95% intervals.", "length", "acceptance", "acceptance length \u03c4"),
    depthPlot(), positionPlot(),
    facetPlot("plot-score-length", `${capital(scaleName)} against context length`, `Mean over the tasks that have it.${direction}`, "length", "score", scaleName),
    ...others.map((name, place) => facetPlot(`plot-facet-${place}`, `${capital(scaleName)} by ${name}`, "With 95% intervals.", name, "score", scaleName)),
    needleMaps(),
  ].filter(Boolean);
}
