"use strict";
// Plots. Each is drawn from the results with the colours of the present theme, and again when it changes.

const QUIET = { displayModeBar: false, responsive: true };

function layout(x, y, more = {}) {
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), tickfont: { size: 12 }, automargin: true, fixedrange: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--sans"), size: 13, color: css("--soft") },
    margin: { l: 8, r: 10, t: 12, b: 8 }, hovermode: "closest",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), family: css("--sans") } },
    legend: { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { size: 12 } },
    xaxis: { ...axis, title: { text: x, standoff: 8, font: { size: 12.5 } }, ...more.x },
    yaxis: { ...axis, title: { text: y, standoff: 8, font: { size: 12.5 } }, ...more.y },
    shapes: more.shapes ?? [], annotations: more.annotations ?? [], bargap: 0.35,
  };
}

/** A line with error bars; points without a figure are left out. */
function line(name, family, points, more = {}) {
  const there = points.filter(([, interval]) => has(interval));
  const [x, intervals] = [there.map(([at]) => at), there.map(([, interval]) => interval)];
  const ink = colour(family);
  return {
    type: "scatter", mode: "lines+markers", name, x, y: intervals.map((i) => i.value),
    error_y: { type: "data", symmetric: false, array: intervals.map((i) => i.high - i.value), arrayminus: intervals.map((i) => i.value - i.low), thickness: 1.2, width: 3, color: ink },
    line: { color: ink, width: 2.2, dash: family.includes("+") ? "dot" : "solid" }, marker: { color: ink, size: 7, line: { color: css("--card"), width: 1.5 } },
    customdata: intervals.map((i) => [range(i, 2), i.n]),
    hovertemplate: `<b>%{fullData.name}</b><br>%{x}: %{y:.2f} %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>`, ...more,
  };
}

/** A card that holds one plot; `build` gives {data, layout} for the present theme. */
function plotCard(id, title, note, build, { controls = null, wide = false, height = null } = {}) {
  const canvas = el("div", { class: "canvas", id, role: "img", "aria-label": title });
  if (height) canvas.style.height = `${height}px`;
  const card = el("div", { class: wide ? "card plot wide" : "card plot" },
    el("div", { class: "title" }, el("h3", {}, title), controls), note && el("p", { class: "note" }, note), canvas);
  const paint = () => { const made = build(); Plotly.react(canvas, made.data, made.layout, QUIET); };
  return { card, paint, start: () => drawn(paint) };
}

/** Plotly reads <b> and the like in its labels: names from outside must not be read so. */
const label = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const entry = (system, task) => (task === "" ? system.average : system.tasks.find((one) => one.task === task)?.score);
const full = run.systems?.find((system) => system.kind === "full");

function budgetPlot() {
  const evicting = run.systems.filter((system) => known(system.budget));
  const budgets = unique(evicting.map((system) => system.budget)).sort((a, b) => parseFloat(a) - parseFloat(b));
  if (!scored || !evicting.length) return null;
  const names = unique(run.systems.flatMap((system) => system.tasks.map((task) => task.task)));
  const numeric = budgets.every((budget) => /^\d+$/.test(budget));
  const at = (budget) => (numeric ? Number(budget) : budget);
  let task = "";
  const plot = plotCard("plot-budget", "Score against budget", `Rows of the prompt that stay in the cache. The band is the full cache's 95% interval.${direction}`, () => {
    const data = families.filter((family) => evicting.some((system) => system.family === family)).map((family) =>
      line(label(family), family, evicting.filter((system) => system.family === family)
        .sort((a, b) => parseFloat(a.budget) - parseFloat(b.budget)).map((system) => [at(system.budget), entry(system, task)])));
    const reference = full && entry(full, task), shapes = [];
    if (has(reference)) {
      const across = { xref: "paper", x0: 0, x1: 1, layer: "below" };
      shapes.push({ ...across, type: "rect", y0: reference.low, y1: reference.high, fillcolor: css("--band"), line: { width: 0 } });
      shapes.push({ ...across, type: "line", y0: reference.value, y1: reference.value, line: { color: css("--ink"), width: 1.5, dash: "dash" } });
    }
    const annotations = has(reference) ? [{ xref: "paper", x: 1, xanchor: "right", y: reference.value, yanchor: "bottom", text: `full cache ${fixed(reference.value)}`, showarrow: false, font: { size: 12, color: css("--ink") } }] : [];
    const x = numeric ? { type: "log", tickvals: budgets.map(Number), ticktext: budgets } : { type: "category", categoryorder: "array", categoryarray: budgets };
    return { data, layout: layout("budget", task === "" ? `average ${scaleName}` : scaleName, { x, shapes, annotations }) };
  }, { controls: names.length > 1 && select([["", "average"], ...names.map((name) => [name, name])], "", (chosen) => { task = chosen; plot.paint(); }, "Task of the budget plot") });
  return plot;
}

function averagePlot() {
  const systems = run.systems.filter((system) => has(system.average));
  if (systems.length < 2) return null;
  return plotCard("plot-average", systems[0].tasks.length > 1 ? `Average ${scaleName}` : `The ${scaleName}`, `With 95% intervals; ordered by value.${direction}`, () => {
    const up = [...systems].sort((a, b) => (a.average.value - b.average.value) * (run.scale.higher_is_better ? 1 : -1));
    const of = (get) => up.map((system) => get(system.average));
    return {
      data: [{
        type: "bar", orientation: "h", y: up.map((system) => label(system.name)), x: of((a) => a.value),
        marker: { color: up.map((system) => colour(system.family)), opacity: 0.85, cornerradius: 4 },
        error_x: { type: "data", symmetric: false, array: of((a) => a.high - a.value), arrayminus: of((a) => a.value - a.low), color: css("--ink"), thickness: 1.2, width: 3 },
        customdata: of((a) => [range(a, 2), a.n]), hovertemplate: "<b>%{y}</b><br>%{x:.2f} %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>",
      }],
      layout: layout("", "", { x: { rangemode: "tozero" }, y: { tickfont: { size: 11.5 }, ticksuffix: " " } }),
    };
  }, { height: Math.max(300, 60 + 23 * systems.length) });
}

const facetsOf = (system, name) => (system.facets ?? []).filter((one) => one.facet === name);
/** Lines over one facet: the systems most worth seeing, and all on request by the legend. */
function facetPlot(id, title, note, facet, key, axis) {
  const systems = run.systems.filter((system) => facetsOf(system, facet).some((one) => has(one[key])));
  const values = ordered(systems.flatMap((system) => facetsOf(system, facet).map((one) => one.value)));
  if (values.length < 2) return null;
  const numeric = values.every((value) => typeof value === "number");
  const log = numeric && facet === "length";
  const shown = new Set(fewOf(systems).map((system) => system.name));
  return plotCard(id, title, systems.length > shown.size ? `${note} Press a name to show or hide it.` : note, () => {
    const data = systems.map((system) => {
      const points = facetsOf(system, facet).map((one) => [numeric ? one.value : label(one.value), one[key]]);
      return line(label(system.name), system.family, points, { visible: shown.has(system.name) ? true : "legendonly", ...(numeric ? {} : { mode: "markers" }) });
    });
    const x = log ? { type: "log", tickvals: values, ticktext: values.map(tokens) } : numeric ? { tickvals: values.length < 12 ? values : undefined } : { type: "category", categoryorder: "array", categoryarray: values.map(label) };
    return { data, layout: layout(facet === "length" ? "context length, tokens" : facet, axis, { x }) };
  }, { height: 340 + 9 * Math.max(0, systems.length - 4) });
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
  return plotCard("plot-depth", "Acceptance by depth of the draft", "Share accepted where the token before it was; 95% Wilson intervals.", () => ({
    data: systems.map((system) => line(label(system.name), system.family, system.acceptance.by_depth.filter((row) => row.tried).map((row) => [row.depth, row.rate]))),
    layout: layout("depth of the drafted token", "accepted", { x: { dtick: 1 }, y: { range: [0, 1.02], tickformat: ".0%" } }),
  }));
}

function positionPlot() {
  const systems = run.systems.filter((system) => system.acceptance?.by_position.filter((row) => has(row.tau)).length > 1);
  if (!systems.length) return null;
  return plotCard("plot-position", "Acceptance by place in the output", "Acceptance length \u03c4 of the cycles that begin there.", () => ({
    data: systems.map((system) => line(label(system.name), system.family, system.acceptance.by_position.map((row) => [(row.from + row.below) / 2, row.tau]))),
    layout: layout("generated token", "acceptance length \u03c4"),
  }));
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
  const canvases = names.map((name) => el("div", { class: "canvas", id: `plot-needle-${names.indexOf(name)}`, role: "img", "aria-label": `Needle map of ${name}` }));
  const paint = () => names.forEach((name, place) => {
    const inside = cells.filter((cell) => cell.system === name && keyOf(cell) === chosen);
    const lengths = ordered(inside.map((cell) => cell.facets.length)), depths = ordered(inside.map((cell) => cell.facets.depth));
    const find = (length, depth) => inside.find((cell) => cell.facets.length === length && cell.facets.depth === depth)?.score;
    const grid = depths.map((depth) => lengths.map((length) => find(length, depth)?.value ?? null));
    const few = lengths.length <= 6;
    Plotly.react(canvases[place], [{
      type: "heatmap", x: lengths.map(tokens), y: depths.map(String), z: grid, zmin: 0, zmax: maximum, xgap: 2, ygap: 2, showscale: false,
      colorscale: [[0, css("--low")], [1, css("--high")]], text: grid.map((row) => row.map((value) => (known(value) ? String(Math.round(value)) : ""))),
      texttemplate: few ? "%{text}" : "", textfont: { size: 11 },
      customdata: depths.map((depth) => lengths.map((length) => { const found = find(length, depth); return found ? [range(found), found.n] : ["", 0]; })),
      hovertemplate: "%{x} tokens, depth %{y}%<br><b>%{z:.1f}</b> %{customdata[0]}<br>n = %{customdata[1]}<extra></extra>",
    }], layout("context length, tokens", "depth, %", { x: { type: "category", showgrid: false }, y: { type: "category", autorange: "reversed", showgrid: false } }), QUIET);
  });
  const card = el("div", { class: "card plot wide" },
    el("div", { class: "title" }, el("h3", {}, "Needles by length and depth"), keys.length > 1 && select(keys.map((key) => [key, key]), chosen, (key) => { chosen = key; paint(); }, "Task of the needle maps")),
    el("p", { class: "note" }, `Mean ${scaleName} of each cell: the darker the fuller in light, the brighter in dark; ${maximum} is the best. Depth 0 is the start of the context.`),
    el("div", { class: "maps" }, names.map((name, place) => el("div", {}, el("h4", {}, systemLabel(name)), canvases[place]))));
  return { card, start: () => drawn(paint) };
}

function plots() {
  const others = unique((run.systems ?? []).flatMap((system) => (system.facets ?? []).map((one) => one.facet))).filter((name) => !["length", "depth"].includes(name));
  return [
    budgetPlot(), averagePlot(),
    facetPlot("plot-tau-length", "Acceptance against context length", "Acceptance length \u03c4 with 95% intervals.", "length", "acceptance", "acceptance length \u03c4"),
    depthPlot(), positionPlot(),
    facetPlot("plot-score-length", "Score against context length", `Mean over the tasks that have it.${direction}`, "length", "score", scaleName),
    ...others.map((name, place) => facetPlot(`plot-facet-${place}`, `Score by ${name}`, "With 95% intervals.", name, "score", scaleName)),
    needleMaps(),
  ].filter(Boolean);
}
