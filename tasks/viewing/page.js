"use strict";
// The page of a run. Texts of models and data only ever become text nodes. `data` holds the summary, and in a written
// file also what a server would be asked for, by path.
const data = JSON.parse(document.getElementById("data").textContent);
const token = new URLSearchParams(location.search).get("token");
const at = (id) => document.getElementById(id);
const PAGE_ROWS = 50, ITERATIONS_MAX = 64, TABLE_ITERATIONS = 30, LOOK_MS = 15000;
let summary = data.summary, rows = null, shown = [], limit = PAGE_ROWS, opened = -1, loads = 0;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

async function ask(path) {
  if (data.answers) {
    if (path in data.answers) return data.answers[path];
    throw new Error("this file does not hold it; `gleaner view` shows the whole run");
  }
  const answer = await fetch("data/" + path, { headers: { "X-Gleaner-Token": token ?? "" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// Runs `act` and shows its error until an action of the user succeeds. A look at the run by the clock (isAsked: false)
// hides only errors of such looks.
async function trying(act, isAsked = true) {
  const problem = at("problem");
  try {
    const found = await act();
    if (isAsked || problem.dataset.asked === "false") problem.hidden = true;
    return found;
  } catch (error) {
    if (!isAsked && !problem.hidden && problem.dataset.asked === "true") return null;
    problem.textContent = error instanceof TypeError ? "`gleaner view` does not answer; is it still running?" : error.message;
    problem.dataset.asked = String(isAsked);
    problem.hidden = false;
    return null;
  }
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// In a column numbers have the same digits; in a sentence zeros at the end are left out.
const digits = { 3: new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 }), 4: new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }) };
const number = (value, precision = 3) =>
  value === null || value === undefined || Number.isNaN(value) ? "" : Number.isInteger(value) ? whole.format(value) : digits[precision].format(value);
const time = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "");

// The header, the charts and the table of iterations.

function drawSummary() {
  at("failures").replaceChildren(...summary.failures.map((line) => make("li", {}, line)));
  at("failures").hidden = !summary.failures.length;
  const newest = newestIteration(), isOpen = summary.planned.length > 0;
  const facts = { "newest iteration": newest < 0 ? "" : isOpen ? `${newest}, under way` : `${newest}, committed ${time(summary.last_s)}`, ...summary.facts };
  at("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value)
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  at("config").textContent = summary.config;
  at("charts").replaceChildren(...summary.charts.map((drawing) =>
    make("figure", { tabindex: 0 }, document.importNode(new DOMParser().parseFromString(drawing, "image/svg+xml").documentElement, true))));
  const [head, ...compared] = summary.compared;
  at("compared").replaceChildren(make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))),
    make("tbody", {}, ...compared.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))));
  at("h-compared").textContent = `Iteration ${summary.iterations.length - 1} beside the one before`;
  at("beside").hidden = !compared.length;
  drawIterations();
}

// The iterations are numbered from 0, without gaps; those under way follow the committed ones. -1: there is none.
const newestIteration = () => summary.iterations.length + summary.planned.length - 1;

function drawIterations(all = false) {
  const cells = summary.iterations.map((values, index) => [index, values.map((value) => number(value))]);
  for (const index of summary.planned) cells.push([index, ["under way", ...Array(summary.columns.length - 1).fill("")]]);
  cells.reverse();
  const head = make("tr", {}, make("th", {}, "iteration"), ...summary.columns.map((name) => make("th", {}, name)));
  const body = cells.slice(0, all ? cells.length : TABLE_ITERATIONS).map(([index, values]) => make("tr", {},
    make("td", {}, make("button", { class: "link", type: "button", "aria-label": `Responses of iteration ${index}`, on: { click: () => choose(index) } }, String(index))),
    ...values.map((value) => make("td", {}, value))));
  at("iterations").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  at("older").hidden = all || cells.length <= TABLE_ITERATIONS;
}

function choose(iteration) {
  filter.iterations.value = String(iteration);
  load().then(() => at("h-responses").scrollIntoView());
}

// The responses: loaded by iteration as columns, filtered and sorted here.

const filter = at("filter").elements;

function chosen() {
  const last = newestIteration();
  const found = /^(\d*)(:?)(\d*)$/.exec(filter.iterations.value.trim());
  if (!found) throw new Error(`iterations: value ${filter.iterations.value}; allowed: a, a:b (without b), a: or :b`);
  const first = found[1] === "" ? (found[2] ? 0 : last) : Number(found[1]);
  const end = found[2] ? (found[3] === "" ? last + 1 : Number(found[3])) : first + 1;
  if (first >= end || end > last + 1) throw new Error(`iterations: value ${filter.iterations.value}; allowed: the run has 0 to ${last}`);
  if (end - first > ITERATIONS_MAX) throw new Error(`iterations: ${end - first} of them; allowed: ${ITERATIONS_MAX} at a time`);
  return Array.from({ length: end - first }, (_, index) => first + index);
}

async function load() {
  if (newestIteration() < 0) { at("count").textContent = "The run has no iteration yet."; return; }
  const mine = ++loads;
  await trying(async () => {
    const blocks = [];
    for (const iteration of chosen()) blocks.push(await ask(`iterations/${iteration}`));
    // Other iterations may have been chosen meanwhile.
    if (mine !== loads) return;
    rows = joined(blocks);
    fillChoices();
    apply();
    for (const block of blocks) {
      const found = await ask(`advantages/${block.iteration}`);
      if (mine !== loads) return;
      if (found) setAdvantages(block.iteration, found);
    }
  });
}

// The columns of several iterations as typed arrays, which a filter goes through in a few milliseconds. NaN: not known.
function joined(blocks) {
  const count = blocks.reduce((sum, block) => sum + block.states.length, 0), prompts = blocks.flatMap((block) => block.prompts);
  const all = {
    count, prompts, orders: new Map(), starts: new Map(), texts: new Map(), lower: prompts.map((prompt) => `${prompt.text} ${prompt.id}`.toLowerCase()),
    states: [...new Set(blocks.flatMap((block) => block.states))].sort(), named: Object.create(null), advantage: new Float64Array(count).fill(NaN),
  };
  for (const name of ["place", "iteration", "response", "group", "prompt", "state", "length", "stretches", "truncated"]) all[name] = new Uint32Array(count);
  for (const name of ["reward", "slot"]) all[name] = new Float64Array(count);
  for (const block of blocks) for (const name of Object.keys(block.rewards_by_name)) all.named[name] ??= new Float64Array(count).fill(NaN);
  const codes = new Map(all.states.map((name, code) => [name, code]));
  let start = 0, firstPrompt = 0;
  for (const block of blocks) {
    all.starts.set(block.iteration, start);
    for (let r = 0; r < block.states.length; r++) {
      const i = start + r, group = Math.floor(r / block.num_generations);
      all.place[i] = i;
      all.iteration[i] = block.iteration;
      all.response[i] = r;
      all.group[i] = group;
      all.prompt[i] = firstPrompt + group;
      all.state[i] = codes.get(block.states[r]);
      all.length[i] = block.lengths[r];
      all.stretches[i] = block.stretches[r];
      all.truncated[i] = block.truncated[r];
      all.reward[i] = block.rewards[r] ?? NaN;
      all.slot[i] = block.slots[r] ?? NaN;
    }
    for (const [name, values] of Object.entries(block.rewards_by_name)) all.named[name].set(Float64Array.from(values, (value) => value ?? NaN), start);
    start += block.states.length;
    firstPrompt += block.prompts.length;
  }
  return all;
}

function setAdvantages(iteration, found) {
  const start = rows.starts.get(iteration);
  for (const [response, value] of Object.entries(found)) rows.advantage[start + Number(response)] = value;
  rows.orders.delete("advantage");
  drawRows();
}

// The columns that the responses can be sorted by.
const columns = () => ({
  response: rows.place, group: rows.group, reward: rows.reward, advantage: rows.advantage, tokens: rows.length,
  slot: rows.slot, stretches: rows.stretches, ...Object.fromEntries(Object.entries(rows.named).map(([name, values]) => [`reward: ${name}`, values])),
});

// The choices of an order: a column, after "-" if its greatest values come first.
const orders = () => [["response", "by number"], ["-reward", "best first"], ["reward", "worst first"], ["-tokens", "longest first"], ["tokens", "shortest first"],
  ["-advantage", "highest advantage first"], ["advantage", "lowest advantage first"], ["-stretches", "most resumed first"], ["slot", "by slot"],
  ...Object.keys(rows.named).flatMap((name) => [[`-reward: ${name}`, `highest ${name} first`], [`reward: ${name}`, `lowest ${name} first`]])];

// All responses by one column, ascending, and how many of them are known; the others come last. A counting sort by the
// distinct values, which takes a third of the time of a sort with a comparison. It is kept.
function order(name) {
  if (!rows.orders.has(name)) {
    const keys = columns()[name], values = Float64Array.from(new Set(keys)).sort(), sorted = new Uint32Array(rows.count);
    const places = new Map(Array.from(values, (value, place) => [value, place])), next = new Uint32Array(values.length + 1);
    for (let i = 0; i < rows.count; i++) next[places.get(keys[i]) + 1]++;
    for (let place = 1; place < next.length; place++) next[place] += next[place - 1];
    const known = places.has(NaN) ? next[values.length - 1] : rows.count;
    for (let i = 0; i < rows.count; i++) sorted[next[places.get(keys[i])]++] = i;
    rows.orders.set(name, { sorted, known });
  }
  return rows.orders.get(name);
}

function fillChoices() {
  const keep = (select, options) => {
    const value = select.value;
    select.replaceChildren(...options.map(([name, label]) => make("option", { value: name }, label)));
    if (options.some(([name]) => name === value)) select.value = value;
  };
  keep(filter.state, [["", "all"], ...rows.states.map((name) => [name, name])]);
  keep(filter.sort, orders());
}

function apply() {
  const bound = (name, otherwise) => (filter[name].value === "" ? otherwise : Number(filter[name].value));
  const [group, slot, state, text] = [bound("group", null), bound("slot", null), rows.states.indexOf(filter.state.value), filter.prompt.value.toLowerCase()];
  const [rewardMin, rewardMax] = [bound("rewardMin", -Infinity), bound("rewardMax", Infinity)];
  const [lengthMin, lengthMax] = [bound("lengthMin", -Infinity), bound("lengthMax", Infinity)];
  const byReward = filter.rewardMin.value !== "" || filter.rewardMax.value !== "";
  const [truncated, resumed] = [filter.truncated.checked, filter.resumed.checked];
  const hits = text ? Uint8Array.from(rows.lower, (prompt) => prompt.includes(text)) : null;
  const isWanted = (i) => (state < 0 || rows.state[i] === state) && (group === null || rows.group[i] === group)
    && (slot === null || rows.slot[i] === slot) && rows.length[i] >= lengthMin && rows.length[i] <= lengthMax
    && (!byReward || (rows.reward[i] >= rewardMin && rows.reward[i] <= rewardMax))
    && (!truncated || rows.truncated[i] === 1) && (!resumed || rows.stretches[i] > 1) && (!hits || hits[rows.prompt[i]] === 1);
  const descends = filter.sort.value.startsWith("-"), { sorted, known } = order(filter.sort.value.slice(descends ? 1 : 0)), found = [];
  for (let place = 0; place < sorted.length; place++) {
    const i = sorted[descends && place < known ? known - 1 - place : place];
    if (isWanted(i)) found.push(i);
  }
  shown = found;
  limit = PAGE_ROWS;
  drawRows();
}

function drawRows() {
  const several = rows.starts.size > 1, names = Object.keys(rows.named).length > 1 ? Object.keys(rows.named) : [];
  const titles = [...(several ? ["iteration"] : []), "response", "prompt", "completion", "reward", ...names, "advantage", "tokens", "group", "slot", "stretches", "state"];
  const opener = (i, place) => make("button", { class: "link", type: "button", "aria-label": `Open response ${rows.response[i]} of iteration ${rows.iteration[i]}`, on: { click: () => openAt(place) } }, String(rows.response[i]));
  const cells = (i, place) => [...(several ? [rows.iteration[i]] : []), opener(i, place), rows.prompts[rows.prompt[i]].text, rows.texts.get(i) ?? "", number(rows.reward[i]),
    ...names.map((name) => number(rows.named[name][i])), number(rows.advantage[i]), number(rows.length[i]) + (rows.truncated[i] ? " cut" : ""), rows.group[i],
    Number.isNaN(rows.slot[i]) ? "" : rows.slot[i], rows.stretches[i] > 1 ? `${rows.stretches[i]} resumed` : rows.stretches[i], rows.states[rows.state[i]]];
  const kind = (title) => (["prompt", "completion", "state"].includes(title) ? `text ${title}` : false);
  // The name of each value stands before it where the row is too narrow for columns.
  const body = shown.slice(0, limit).map((i, place) => make("tr", { role: "row", class: place === opened ? "chosen" : false },
    ...cells(i, place).map((cell, column) => make("td", { role: "cell", class: kind(titles[column]), "data-name": titles[column] }, typeof cell === "number" ? String(cell) : cell))));
  at("responses").replaceChildren(make("thead", {}, make("tr", {}, ...titles.map((name) => make("th", { class: kind(name) }, name)))), make("tbody", { role: "rowgroup" }, ...body));
  const drawn = [...rows.starts.keys()], newest = newestIteration(), last = drawn[drawn.length - 1];
  const which = drawn.length > 1 ? `iterations ${drawn[0]} to ${last}` : `iteration ${last}`, state = summary.planned.includes(newest) ? ", under way" : "";
  at("count").textContent = `${number(shown.length)} of ${number(rows.count)} responses of ${which}${last === newest ? ` (the newest${state})` : ""}`;
  at("more").hidden = shown.length <= limit;
  loadTexts();
}

// The texts of the rows that are drawn, a page at a time; a file has one answer for each response.
async function loadTexts() {
  const loaded = rows, missing = shown.slice(0, limit).filter((i) => !loaded.texts.has(i));
  if (!missing.length) return;
  for (const i of missing) loaded.texts.set(i, "");
  const isLoaded = await trying(async () => {
    for (const iteration of loaded.starts.keys()) {
      const wanted = missing.filter((i) => loaded.iteration[i] === iteration), numbers = wanted.map((i) => loaded.response[i]);
      for (let first = 0; first < wanted.length; first += PAGE_ROWS) {
        const page = numbers.slice(first, first + PAGE_ROWS), path = `texts/${iteration}/`;
        const texts = data.answers ? page.map((response) => data.answers[path + response]?.[0] ?? null) : await ask(path + page.join("/"));
        texts.forEach((text, index) => loaded.texts.set(wanted[first + index], text ?? "(not available)"));
      }
    }
    return true;
  }, false);
  if (!isLoaded) for (const i of missing) if (!loaded.texts.get(i)) loaded.texts.delete(i);
  if (loaded !== rows) return;
  for (const [place, row] of [...at("responses").tBodies[0].rows].entries()) row.querySelector(".completion").textContent = rows.texts.get(shown[place]) ?? "";
}

// One response.

async function openAt(place) {
  if (place < 0 || place >= shown.length) return;
  opened = place;
  await openResponse(rows.iteration[shown[place]], rows.response[shown[place]]);
}

async function openResponse(iteration, response) {
  const dialog = at("detail");
  let view;
  try {
    view = await ask(`responses/${iteration}/${response}`);
  } catch (error) {
    dialog.replaceChildren(bar(), make("h2", { id: "detail-title" }, `Response ${response} of iteration ${iteration}`), make("p", { class: "problem" }, error.message));
    if (!dialog.open) dialog.showModal();
    return;
  }
  const start = rows.starts.get(iteration), advantage = view.advantage ?? (start === undefined ? NaN : rows.advantage[start + response]);
  const rewards = Object.entries(view.rewards).map(([name, value]) => `${name} ${value === null ? "not applicable" : number(value, 4)}`);
  const space = make("div", { id: "text" }, drawStretches(view));
  dialog.replaceChildren(
    bar(make("button", { type: "button", on: { click: () => space.replaceChildren(drawStretches(view)) } }, "Its text"),
      make("button", { type: "button", on: { click: () => colourTokens(view, space) } }, "Colour tokens by log-prob"),
      make("button", { type: "button", on: { click: () => showGroup(view, space) } }, "Its group side by side"),
      make("button", { type: "button", on: { click: () => showPlaces(view, space) } }, "Its prompt in other iterations")),
    make("h2", { id: "detail-title" }, `Iteration ${iteration}, response ${response}`),
    make("p", {}, `Sample ${view.sample} of group ${view.group}, prompt ${view.prompt_id}: ${number(view.tokens)} tokens, ${view.state}.`,
      view.state === "failed" ? " Not graded: its environment was lost." : view.reward === null ? (view.state === "trained" ? "" : " Not graded yet.") : ` Reward ${number(view.reward, 4)}${rewards.length ? ` (${rewards.join(", ")})` : ""}.`,
      Number.isNaN(advantage) ? "" : ` Advantage ${number(advantage, 4)}.`,
      Object.entries(view.gradings).map(([name, reward]) => ` By grading ${name} ${number(reward, 4)}.`).join("")),
    make("h3", {}, "Prompt"), make("div", { class: "prose prompt", tabindex: 0 }, view.prompt),
    make("details", {}, make("summary", {}, "Other columns of its row"), make("pre", { tabindex: 0 }, JSON.stringify(view.columns, null, 2))),
    make("h3", {}, "Response"), space,
    ...(view.calls.length ? [make("h3", {}, "Calls of tools"), drawCalls(view.calls)] : []));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

const bar = (...buttons) => make("div", { class: "bar" },
  make("button", { type: "button", on: { click: () => at("detail").close() } }, "Close"),
  make("button", { type: "button", on: { click: () => openAt(opened - 1) } }, "Previous"),
  make("button", { type: "button", on: { click: () => openAt(opened + 1) } }, "Next"), ...buttons);

const KINDS = { killed: "killed", "handed over": "moved", "taken over": "moved" };

// The one place where the stretches of a response become a picture.
function drawStretches(view, pieces = null) {
  const box = make("div", { class: "prose", tabindex: 0 });
  if (!view.stretches.length) box.append(make("span", { class: "muted" }, "Not begun."));
  for (const stretch of view.stretches) {
    const until = stretch.first + stretch.tokens, kind = KINDS[stretch.end];
    box.append(make("span", { class: `stretch ${kind ?? ""}` },
      `tokens ${number(stretch.first)} to ${number(until)}, slot ${stretch.slot}, incarnation ${stretch.incarnation}, weight version ${stretch.weight_version}: ${stretch.end}${kind ? ` at token ${number(until)}` : ""}`));
    if (pieces) box.append(...pieces.slice(stretch.first, until).map(drawToken));
    else box.append(view.has_text ? stretch.text : "There is no tokenizer; colour the tokens to see their ids.");
  }
  return box;
}

function drawCalls(calls) {
  const cells = (call) => [call.turn, call.call, call.result, call.outcome, number(call.seconds, 3)];
  return make("table", {}, make("thead", {}, make("tr", {}, ...["turn", "call", "result", "outcome", "seconds"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, ...calls.map((call) => make("tr", {}, ...cells(call).map((cell) => make("td", {}, String(cell)))))));
}

function drawToken([text, logprob]) {
  const surprise = logprob === null ? 0 : Math.min(1, -logprob / 5);
  return make("span", { class: "token", style: `--share: ${surprise.toFixed(2)}`, title: logprob === null ? "" : `log-prob ${logprob.toFixed(4)}, probability ${Math.exp(logprob).toFixed(4)}` }, text);
}

async function colourTokens(view, space, pieces = []) {
  await trying(async () => {
    pieces = pieces.concat(await ask(`tokens/${view.iteration}/${view.response}/${pieces.length}`));
    space.replaceChildren(make("p", { class: "muted" }, "The stronger the colour, the less likely the token was; point at one to see its log-prob."), drawStretches(view, pieces));
    if (pieces.length < view.tokens) space.append(make("button", { type: "button", on: { click: () => colourTokens(view, space, pieces) } }, `Colour the next of ${number(view.tokens - pieces.length)} tokens`));
  });
}

async function showGroup(view, space) {
  await trying(async () => {
    const size = (await ask(`iterations/${view.iteration}`)).num_generations;
    const views = await Promise.all(Array.from({ length: size }, (_, sample) => ask(`responses/${view.iteration}/${view.group * size + sample}`)));
    space.replaceChildren(make("div", { class: "beside", tabindex: 0, role: "region", "aria-label": `Group ${view.group}` },
      ...views.map((each) => make("div", {}, make("h3", {}, `Response ${each.response}`), make("p", {}, each.reward === null ? "not graded" : `reward ${number(each.reward, 4)}`), drawStretches(each)))));
  });
}

async function showPlaces(view, space) {
  await trying(async () => {
    const places = await ask(`prompts/${encodeURIComponent(view.prompt_key)}`);
    space.replaceChildren(make("h3", {}, places.length > 1 ? `Prompt ${view.prompt_id} in ${places.length} groups` : `Prompt ${view.prompt_id} is in this group alone`), make("ul", {}, ...places.map(([iteration, response]) =>
      make("li", {}, make("button", { class: "link", type: "button", on: { click: () => openResponse(iteration, response) } }, `iteration ${iteration}, from response ${response} on`)))));
  });
}

at("filter").addEventListener("submit", (event) => event.preventDefault());
at("filter").addEventListener("input", (event) => (event.target === filter.iterations ? null : rows && apply()));
filter.iterations.addEventListener("change", load);
at("more").addEventListener("click", () => { limit += PAGE_ROWS; drawRows(); });
at("older").addEventListener("click", () => drawIterations(true));
at("detail").addEventListener("close", () => { if (rows) drawRows(); const row = at("responses").querySelector("tr.chosen button"); if (row) row.focus(); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (at("detail").open && event.key === "j") openAt(opened + 1);
  else if (at("detail").open && event.key === "k") openAt(opened - 1);
  else if (!at("detail").open && event.key === "/") { event.preventDefault(); at("more-filters").open = true; filter.prompt.focus(); }
});

drawSummary();
load();
// A run that goes on is looked at again; what is open or filtered stays.
if (!data.answers) setInterval(() => trying(async () => {
  const found = await ask("summary"), same = (each) => JSON.stringify({ ...each, looked_at_s: 0 });
  if (same(found) === same(summary)) return;
  summary = found;
  drawSummary();
}, false), LOOK_MS);
