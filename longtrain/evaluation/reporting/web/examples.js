"use strict";
// Outputs of the systems side by side.

const STEP = 12;
const WORDS = 600;
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
  if (text === "") return el("p", { class: "faint small" }, "(empty)");
  const parts = known(reference) && reference !== text ? differing(text, reference) : [[text, false]];
  return el("pre", { class: "text" }, parts.map(([part, odd]) => (odd ? el("mark", {}, visible(part)) : visible(part))));
}

function outputCell(name, output, reference) {
  const value = output.score, maximum = run.scale.maximum ?? 1;
  const shown = output.measures ? Object.entries(output.measures).map(([key, number]) => `${key} ${Number(number.toFixed(4))}`).join(" \u00b7 ")
    : known(value) ? fixed(maximum * value, 1) : "no score";
  const tau = output.cycles?.[1] ? `\u03c4 ${fixed(output.cycles[0] / output.cycles[1])}` : null;
  return el("div", {},
    el("div", { class: "who" }, systemLabel(name), el("span", { class: "score", title: scaleName }, shown)),
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
      one.references.length > 0 && el("p", { class: "refs" }, el("span", { class: "soft" }, "Expected "), one.references.map((text, place) => [place > 0 && el("span", { class: "faint" }, " or "), el("b", {}, visible(text))])),
      one.prompt_start && el("details", {}, el("summary", {}, "Prompt"), el("pre", { class: "text prompt" }, visible(one.prompt_start)), middle, one.prompt_end && el("pre", { class: "text prompt" }, visible(one.prompt_end)))),
    el("div", { class: "outputs" }, chosen.filter((name) => one.outputs[name]).map((name) => outputCell(name, one.outputs[name], full && name !== full.name ? reference : null))));
}

/** Three systems to begin with: the full cache, and the smallest budgets of two families, an artifact first. */
function contrasts() {
  const kinds = ["artifact", "policy", "combined"];
  const rank = (system) => kinds.indexOf(system.kind) + (known(system.budget) ? 0 : 10);
  const firsts = families.map((family) => run.systems.filter((system) => system.family === family)
    .sort((a, b) => parseFloat(a.budget) - parseFloat(b.budget))[0]).sort((a, b) => rank(a) - rank(b));
  return [...(full ? [full] : []), ...firsts].slice(0, 3);
}

function examplesSection() {
  if (!page.examples.length) return null;
  const names = run.systems.map((system) => system.name);
  const chosen = new Set(contrasts().map((system) => system.name));
  const state = { text: "", task: "", texts: false, scores: false, order: "suite", shown: STEP };
  const searchable = page.examples.map((one) => [one.example, one.task, one.prompt_start, one.prompt_end, ...one.references, ...Object.values(one.outputs).flatMap((output) => output.texts)].join("\n").toLowerCase());
  const list = el("div", { id: "examples-list" }), count = el("span", { class: "soft", id: "examples-count", "aria-live": "polite" });

  const outputs = (one) => names.filter((name) => chosen.has(name) && one.outputs[name]).map((name) => one.outputs[name]);
  const differ = (values) => unique(values).length > 1;
  const spread = (one) => { const scores = outputs(one).map((output) => output.score).filter(known); return scores.length ? Math.max(...scores) - Math.min(...scores) : -1; };
  const level = (one) => { const scores = outputs(one).map((output) => output.score).filter(known); return scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : 2; };
  function show() {
    const found = page.examples.filter((one, place) =>
      (state.text === "" || searchable[place].includes(state.text)) && (state.task === "" || one.task === state.task) &&
      (!state.texts || differ(outputs(one).map((output) => JSON.stringify(output.texts)))) &&
      (!state.scores || differ(outputs(one).map((output) => output.score ?? JSON.stringify(output.measures)))));
    if (state.order === "spread") found.sort((a, b) => spread(b) - spread(a));
    if (state.order === "worst") found.sort((a, b) => level(a) - level(b));
    count.textContent = `${found.length} of ${plural(page.examples.length, "example")}`;
    const order = names.filter((name) => chosen.has(name));
    dots.splice(0, dots.length, ...dots.filter(([node]) => node.isConnected && !list.contains(node)));
    list.replaceChildren(...found.slice(0, state.shown).map((one) => exampleCard(one, order)));
    if (!found.length) list.append(el("div", { class: "card empty" }, "No example matches. Clear the search, or choose other systems."));
    if (found.length > state.shown) list.append(el("button", { type: "button", class: "ghost more", onclick: () => { state.shown += 2 * STEP; show(); } }, `Show more of ${found.length - state.shown}`));
  }
  const change = (key, value) => { state[key] = value; state.shown = STEP; show(); };
  let waiting = 0;
  const search = el("input", { type: "search", id: "examples-search", placeholder: "Search prompts, outputs, answers", "aria-label": "Search examples",
    oninput: () => { clearTimeout(waiting); waiting = setTimeout(() => change("text", search.value.toLowerCase()), 120); } });
  const tasks = unique(page.examples.map((one) => one.task));
  const box = (id, key, text) => el("label", {}, el("input", { type: "checkbox", id, onchange: (event) => change(key, event.target.checked) }), text);
  const chips = switches(names.map((name) => [name, systemOf[name].family]), chosen, show);
  show();
  const more = page.examples_total > page.examples.length
    ? `Shown here: ${page.examples.length} of ${page.examples_total}, evenly from every task; examples.jsonl has all. ` : "";
  return section("examples", "Examples", `${more}What each system wrote, side by side; marked words are not in the full cache\u2019s output.`,
    el("div", { class: "controls" }, search,
      tasks.length > 1 && el("label", { class: "grow" }, "Task", select([["", "all"], ...tasks.map((task) => [task, task])], "", (task) => change("task", task), "Task of the examples")),
      el("label", { class: "grow" }, "Order", select([["suite", "as in the suite"], ["spread", "largest difference of scores"], ["worst", "lowest score"]], "suite", (order) => change("order", order), "Order of the examples")),
      box("examples-differ", "texts", "texts differ"), box("examples-scores", "scores", "scores differ"), count),
    el("details", { class: "chooser", open: names.length <= 8 || window.innerWidth > 720 }, el("summary", {}, "Systems to compare"), chips), list);
}
