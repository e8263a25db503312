"use strict";
// Outputs of the systems side by side. Text from outside only ever becomes a text node, never markup.

const page = JSON.parse(document.getElementById("data").textContent);
const STEP = 12;
const WORDS = 600;

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

const known = (value) => value !== null && value !== undefined;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const unique = (values) => [...new Set(values)];
const full = page.systems?.find((system) => system.kind === "full");
const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);

/** Marks which words of `text` are not in the longest common subsequence with `other`. */
function differing(text, other) {
  const words = text.match(/\s+|\S+/g) ?? [], theirs = other.match(/\s+|\S+/g) ?? [];
  if (words.length > WORDS || theirs.length > WORDS) return [[text, false]];
  const width = theirs.length + 1, common = new Uint16Array((words.length + 1) * width);
  for (let i = words.length - 1; i >= 0; i--)
    for (let j = theirs.length - 1; j >= 0; j--)
      common[i * width + j] = words[i] === theirs[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  const parts = [];
  let j = 0;
  for (let i = 0; i < words.length; i++) {
    while (j < theirs.length && words[i] !== theirs[j] && common[i * width + j + 1] === common[i * width + j]) j++;
    const same = j < theirs.length && words[i] === theirs[j];
    if (same) j++;
    const odd = !same && words[i].trim() !== "";
    const last = parts[parts.length - 1];
    if (last && last[1] === odd) last[0] += words[i];
    else parts.push([words[i], odd]);
  }
  return parts;
}

function outputText(text, reference) {
  if (text === "") return el("p", { class: "soft" }, "(empty)");
  const parts = known(reference) && reference !== text ? differing(text, reference) : [[text, false]];
  return el("pre", { class: "text" }, parts.map(([part, odd]) => (odd ? el("mark", {}, visible(part)) : visible(part))));
}

function outputCell(name, output, reference) {
  const value = output.score, maximum = page.scale.maximum ?? 1;
  const shown = output.measures ? Object.entries(output.measures).map(([key, number]) => `${key} ${Number(Number(number).toFixed(4))}`).join(" \u00b7 ")
    : known(value) ? (maximum * value).toFixed(1) : "no score";
  const tau = output.cycles?.[1] ? `\u03c4 ${(output.cycles[0] / output.cycles[1]).toFixed(2)}` : null;
  return el("div", {},
    el("div", { class: "who" }, el("span", {}, name), el("span", { class: "score", title: page.scale.name }, shown)),
    output.texts.map((text, turn) => [output.texts.length > 1 && el("p", { class: "turn" }, `turn ${turn + 1}`), outputText(text, reference?.texts[turn])]),
    output.texts.length > 0 && el("p", { class: "turn" }, [plural(output.output_tokens, "token"), tau].filter(Boolean).join(" \u00b7 ")));
}

function exampleCard(one, chosen) {
  const facets = Object.entries(one.facets).map(([name, value]) => el("span", { class: "tag" }, `${name} ${value}`));
  const reference = full && one.outputs[full.name];
  const middle = one.prompt_end && el("p", { class: "gap" }, `\u2026 ${plural(one.prompt_tokens, "token")} in all \u2026`);
  return el("article", { class: "card example" },
    el("div", { class: "line" }, el("b", {}, one.example), el("span", { class: "tag" }, one.task), facets,
      one.prompt_tokens > 0 && el("span", { class: "soft" }, plural(one.prompt_tokens, "prompt token")), one.cut && el("span", { class: "tag" }, "prompt cut in the middle")),
    (one.prompt_start || one.references.length > 0) && el("div", { class: "asked" },
      one.references.length > 0 && el("p", { class: "refs" }, el("span", { class: "soft" }, "Expected "), one.references.map((text, place) => [place > 0 && el("span", { class: "soft" }, " or "), el("b", {}, visible(text))])),
      one.prompt_start && el("details", {}, el("summary", {}, "Prompt"), el("pre", { class: "text prompt" }, visible(one.prompt_start)), middle, one.prompt_end && el("pre", { class: "text prompt" }, visible(one.prompt_end)))),
    el("div", { class: "outputs" }, chosen.filter((name) => one.outputs[name]).map((name) => outputCell(name, one.outputs[name], full && name !== full.name ? reference : null))));
}

/** The systems that are shown first: the full cache, and the smallest budget of two families. */
function firstSystems() {
  const families = unique(page.systems.filter((system) => system !== full).map((system) => system.family));
  const smallest = families.map((family) => page.systems.filter((system) => system.family === family)
    .sort((a, b) => parseFloat(a.budget) - parseFloat(b.budget))[0]);
  return [...(full ? [full] : []), ...smallest].slice(0, 3).map((system) => system.name);
}

function select(options, label, choose) {
  const node = el("select", { "aria-label": label, onchange: () => choose(node.value) }, options.map(([value, text]) => el("option", { value }, text)));
  return node;
}

function examplesSection(section) {
  const names = page.systems.map((system) => system.name), chosen = new Set(firstSystems());
  const state = { text: "", task: "", differ: false, order: "suite", shown: STEP };
  const searchable = page.examples.map((one) => [one.example, one.task, one.prompt_start, one.prompt_end, ...one.references, ...Object.values(one.outputs).flatMap((output) => output.texts)].join("\n").toLowerCase());
  const list = el("div", { id: "examples-list" }), count = el("span", { class: "soft", id: "examples-count", "aria-live": "polite" });

  const outputs = (one) => names.filter((name) => chosen.has(name) && one.outputs[name]).map((name) => one.outputs[name]);
  const scores = (one) => outputs(one).map((output) => output.score).filter(known);
  const spread = (one) => (scores(one).length ? Math.max(...scores(one)) - Math.min(...scores(one)) : -1);
  const level = (one) => (scores(one).length ? scores(one).reduce((a, b) => a + b, 0) / scores(one).length : 2);
  function show() {
    const found = page.examples.filter((one, place) => searchable[place].includes(state.text) && (state.task === "" || one.task === state.task) &&
      (!state.differ || unique(outputs(one).map((output) => JSON.stringify(output.texts))).length > 1));
    if (state.order === "spread") found.sort((a, b) => spread(b) - spread(a));
    if (state.order === "worst") found.sort((a, b) => level(a) - level(b));
    count.textContent = `${found.length} of ${plural(page.examples.length, "example")}`;
    list.replaceChildren(...found.slice(0, state.shown).map((one) => exampleCard(one, names.filter((name) => chosen.has(name)))));
    if (!found.length) list.append(el("p", { class: "empty" }, "No example matches. Clear the search, or choose other systems."));
    if (found.length > state.shown) list.append(el("button", { type: "button", class: "more", onclick: () => { state.shown += 2 * STEP; show(); } }, `Show more of ${found.length - state.shown}`));
  }
  const change = (key, value) => { state[key] = value; state.shown = STEP; show(); };
  const box = (text, checked, changed) => el("label", {}, el("input", { type: "checkbox", checked, onchange: (event) => changed(event.target.checked) }), text);
  const search = el("input", { type: "search", placeholder: "Search prompts, outputs, answers", "aria-label": "Search examples", oninput: () => change("text", search.value.toLowerCase()) });
  const tasks = unique(page.examples.map((one) => one.task));
  const more = page.examples_total > page.examples.length ? `Shown here: ${page.examples.length} of ${page.examples_total}, evenly from every task; examples.jsonl has all. ` : "";
  section.append(el("h2", {}, "Examples"), el("p", {}, `${more}What each system wrote; marked words are not in the full cache\u2019s output.`),
    el("div", { class: "controls" }, search,
      tasks.length > 1 && select([["", "all tasks"], ...tasks.map((task) => [task, task])], "Task", (task) => change("task", task)),
      select([["suite", "as in the suite"], ["spread", "largest difference of scores"], ["worst", "lowest score"]], "Order", (order) => change("order", order)),
      box("texts differ", false, (on) => change("differ", on)), count),
    el("div", { class: "controls" }, names.map((name) => box(name, chosen.has(name), (on) => { if (on) chosen.add(name); else chosen.delete(name); show(); }))), list);
  show();
}

if (page.examples.length) examplesSection(document.getElementById("examples"));
