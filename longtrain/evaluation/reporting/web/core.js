"use strict";
// Shared by the other scripts: the data, elements, numbers, colours, themes.
// Text from outside only ever becomes a text node or an attribute's value, never markup.
const page = JSON.parse(document.getElementById("data").textContent);
const run = page.results;
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (on* are listeners) and children: nodes, texts, lists of them, or nothing. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const known = (value) => value !== null && value !== undefined;
const has = (interval) => known(interval) && known(interval.value);
const fixed = (value, digits = 2) => (known(value) ? value.toFixed(digits).replace("-", "\u2212") : "\u2013");
const signed = (value, digits = 2) => (known(value) && value > 0 ? "+" : "") + fixed(value, digits);
const percent = (share, digits = 1) => (known(share) ? `${(100 * share).toFixed(digits)}%` : "\u2013");
const tokens = (count) => (count >= 1024 && count % 128 === 0 ? `${count / 1024}k` : String(count));
/** Bounds of a figure; the figure itself where too few examples are behind it for an interval. */
const ends = (interval) => (known(interval.low) ? [interval.low, interval.high] : [interval.value, interval.value]);
const range = (interval, digits = 1) => (known(interval.low) ? `[${fixed(interval.low, digits)}, ${fixed(interval.high, digits)}]` : "(too few for an interval)");
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const unique = (values) => [...new Set(values)];
/** Numbers in order, then texts. */
const ordered = (values) => unique(values).sort((a, b) =>
  typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);

// families and their colours: the full cache is ink, the others keep their colour on the whole page
const PALETTE = {
  light: ["#0f6e84", "#d1642b", "#6a4fb3", "#2f8f4e", "#b8327f", "#8a6d1d", "#3b6fd4", "#7d4b3a", "#4f7a7a", "#a33b3b"],
  dark: ["#5cc3d8", "#f39a63", "#ae9bf0", "#74d191", "#f083be", "#dcbf5f", "#86aefb", "#d09d88", "#93c4c4", "#f28b8b"],
};
const families = unique((run.systems ?? []).filter((system) => system.kind !== "full").map((system) => system.family));
const systemOf = Object.fromEntries((run.systems ?? []).map((system) => [system.name, system]));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const theme = () => document.documentElement.dataset.theme;
function colour(family) {
  const place = families.indexOf(family);
  const colours = PALETTE[theme()];
  return place < 0 ? css("--ink") : colours[place % colours.length];
}
const dots = [];
/** A system's or family's coloured dot, repainted when the theme changes. */
function dot(family) {
  const node = el("span", { class: "dot" });
  node.style.background = colour(family);
  dots.push([node, family]);
  return node;
}
const systemLabel = (name) => el("span", { class: "sys" }, dot(systemOf[name]?.family ?? name), el("span", {}, breakable(name)));
/** A name that may be broken after + and before @. */
const breakable = (name) => name.split(/(?<=\+)|(?=@)/).flatMap((part, place) => (place ? [el("wbr"), part] : [part]));
const short = (name, most = 34) => (name.length <= most ? name : `${name.slice(0, most - 15)}\u2026${name.slice(-14)}`);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const redraws = [];
/** Call now and whenever the theme changes. */
function drawn(paint) {
  redraws.push(paint);
  paint();
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  for (const [node, family] of dots) node.style.background = colour(family);
  redraws.forEach((paint) => paint());
}
const preferred = window.matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = preferred.matches ? "dark" : "light";
preferred.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));

const ACCEPTANCE = "acceptance length"; // a scale whose figure is tau itself
const scaleName = run.scale?.name ?? "score";
const better = (difference) => (difference > 0) === (run.scale?.higher_is_better ?? true);
const direction = run.scale && !run.scale.higher_is_better ? " Lower is better." : "";
/** Whether a system is part of plots of the figure: of acceptance only where a draft ran. */
const counts = (system) => scaleName !== ACCEPTANCE || Boolean(system.acceptance);

/** A difference: bold and coloured only where it is larger than noise. */
function difference(versus, digits = 2) {
  if (!versus || !has(versus.difference)) return el("span", { class: "faint" }, "\u2013");
  const value = versus.difference.value;
  const kind = !versus.larger_than_noise ? "within" : better(value) ? "better" : "worse";
  const says = versus.larger_than_noise ? "larger than noise" : "within noise";
  const title = `${signed(value)} ${range(versus.difference, 2)}, ${plural(versus.difference.n, "example")}: ${says}`;
  return el("span", { class: kind, title }, signed(value, digits));
}

/** A point with its interval on a common axis. */
function whisker(interval, low, high, family) {
  const width = 64, at = (value) => (high > low ? (width * (value - low)) / (high - low) : width / 2).toFixed(1);
  const svg = shape("svg", { class: "whisker", width, height: 12, "aria-hidden": "true" });
  const line = shape("line", { x1: at(ends(interval)[0]), x2: at(ends(interval)[1]), y1: 6, y2: 6, "stroke-width": 2, "stroke-linecap": "round", opacity: .45 });
  const point = shape("circle", { cx: at(interval.value), cy: 6, r: 3.5 });
  svg.append(shape("line", { x1: 0, x2: width, y1: 6, y2: 6, stroke: "currentColor", opacity: .12 }), line, point);
  drawn(() => { line.setAttribute("stroke", colour(family)); point.setAttribute("fill", colour(family)); });
  return svg;
}

function segments(options, chosen, choose) {
  const buttons = options.map(([value, label]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
      buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(options[place][0] === value)));
      choose(value);
    } }, label));
  return el("span", { class: "segments", role: "group" }, buttons);
}
function select(options, chosen, choose, label) {
  const node = el("select", { "aria-label": label, onchange: () => choose(node.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  return node;
}
const section = (id, title, about, ...children) =>
  el("section", { id }, el("div", { class: "head" }, el("h2", {}, title), about && el("p", {}, about)), children);
