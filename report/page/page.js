"use strict";
(() => {
  const TABS = ["overview", "samples", "time", "memory", "health"];
  const PALETTE = ["#2f6fc4", "#d97706", "#2e8b57", "#b5477a", "#7a5bb5", "#64748b", "#b4532a", "#0f8b8d", "#8a8d0f", "#c2410c"];
  const FIRST = ["validation/score", "scores", "response_length", "entropy", "approx_kl", "kl", "mismatch_mean", "grad_norm", "loss", "nll",
    "equal_groups", "clip_fraction", "clipped", "seconds/step", "tokens_per_second"];
  const DIVERGING = ["advantages", "mismatch", "returns", "values", "token_scores"];
  const KINDS = ["weight_version", "turn"];
  const SHOWN_ROWS = 200;
  let DATA = null;
  let shown = SHOWN_ROWS;

  // --- small things ---

  const main = document.getElementById("main");
  function make(tag, attributes = {}, ...children) {
    const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter(child => child !== null && child !== undefined));
    return node;
  }
  function number(value, digits = 4) {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(digits)));
  }
  function time(seconds) {
    if (seconds >= 10) return seconds.toFixed(1) + " s";
    return seconds >= 0.1 ? seconds.toFixed(2) + " s" : (1000 * seconds).toFixed(1) + " ms";
  }
  const median = values => {
    const sorted = values.filter(value => value !== null).sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
  };
  const runName = run => run.folder.split("/").slice(-2).join("/");
  const ending = name => name.slice(name.indexOf("/") + 1);
  const at = (value, index) => Array.isArray(value) ? value[index] : value;

  // The address has what is shown, so that a view can be linked to.
  function state() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  }
  function address(changes) {
    const next = { ...state(), ...changes };
    for (const key of Object.keys(next)) if (next[key] === "" || next[key] === null || next[key] === undefined) delete next[key];
    return "#" + new URLSearchParams(next);
  }
  function go(changes, quiet = false) {
    shown = SHOWN_ROWS;
    if (quiet) { history.replaceState(null, "", address(changes)); render(); }
    else location.hash = address(changes);
  }
  const link = (text, changes) => make("a", { href: address(changes) }, text);
  function chosenRun() {
    return DATA.runs[Number(state().run) || 0] || DATA.runs[0];
  }
  function runPicker() {
    if (DATA.runs.length < 2) return null;
    const options = DATA.runs.map((run, index) => make("option", { value: index, selected: run === chosenRun() }, runName(run)));
    return make("label", {}, "Run", make("select", { onchange: event => go({ run: event.target.value, row: "", step: "" }) }, options));
  }
  function table(caption, titles, rows) {
    const cells = row => row.map(cell => cell instanceof Node ? make("td", {}, cell)
      : make("td", { class: typeof cell === "number" ? "number" : null }, typeof cell === "number" ? number(cell) : cell ?? ""));
    return make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, titles.map(title => make("th", { scope: "col" }, title)))),
      make("tbody", {}, rows.map(row => make("tr", {}, cells(row)))));
  }

  // --- charts ---

  let charts = [];
  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }
  /** A chart of lines over steps. lines: [{label, steps, values, colour, dash}], bands: [[label, steps, lows, highs, colour]]. */
  function chart(title, lines, options = {}) {
    const holder = make("div");
    const steps = [...new Set(lines.flatMap(line => line.steps).concat((options.bands || []).flatMap(band => band.steps)))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, index) => [step, index]));
    const spread = (own, values) => {
      const all = new Array(steps.length).fill(null);
      own.forEach((step, index) => { all[place.get(step)] = values[index]; });
      return all;
    };
    const data = [steps];
    const series = [{ label: "step" }];
    const bands = [];
    for (const band of options.bands || []) {
      bands.push({ series: [data.length + 1, data.length], fill: band.colour + "33" });
      for (const edge of ["lows", "highs"]) {
        data.push(spread(band.steps, band[edge]));
        series.push({ label: `${band.label} ${edge === "lows" ? "lowest" : "highest"}`, stroke: band.colour + "55", width: 1, spanGaps: true, points: { show: false } });
      }
    }
    for (const line of lines) {
      data.push(spread(line.steps, line.values));
      series.push({ label: line.label, stroke: line.colour, width: 2, dash: line.dash, spanGaps: true, fill: line.fill, points: { show: line.steps.length < 40, size: 5 },
        value: (_, value) => number(value) });
    }
    const told = lines.filter(line => line.values.some(value => value !== null)).map(line => {
      const known = (line.own || line.values).map((value, index) => [line.steps[index], value]).filter(pair => pair[1] !== null);
      const [first, last] = [known[0], known[known.length - 1]];
      return `${line.label}: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
    }).join("; ");
    const figure = make("figure", { class: "chart", "data-chart": title }, make("figcaption", {}, title),
      make("div", { role: "img", "aria-label": `Chart of ${title} over steps. ${told}` }, holder));
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    charts.push(() => {
      const width = Math.max(figure.clientWidth - 18, 240);
      const plot = new uPlot({
        width, height: options.height || 190, scales: { x: { time: false }, y: { range: (_, least, most) => options.fromZero ? [0, 1.05 * (most || 1)] : least === most ? [Math.min(least, 0), Math.max(most, 0) || 1] : uPlot.rangeNum(least, most, 0.1, true) } },
        series, bands, axes: [{ ...axis, size: 32 }, { ...axis, size: 58, values: (_, ticks) => ticksAsText(ticks) }],
        cursor: { sync: { key: "steps" } }, legend: { live: true },
      }, data, holder);
      plot.over.addEventListener("click", () => {
        const index = plot.cursor.idx;
        if (index !== null && index !== undefined) go({ tab: options.onclick || "samples", step: steps[index], row: "" });
      });
      figure.setAttribute("data-drawn", "yes");
    });
    return figure;
  }
  /** Numbers of an axis with as many digits as tell them apart. */
  function ticksAsText(ticks) {
    const known = ticks.filter(tick => tick !== null);
    const step = known.length > 1 ? Math.abs(known[1] - known[0]) : 1;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return ticks.map(tick => tick === null ? "" : digits > 5 ? number(tick, 3) : Math.abs(tick) >= 1e5 ? number(tick, 3) : tick.toFixed(digits));
  }
  function draw() {
    const waiting = charts;
    charts = [];
    waiting.forEach(one => one());
  }
  function smoothed(values, weight) {
    if (!weight) return values;
    let mean = null;
    return values.map(value => {
      if (value === null) return null;
      mean = mean === null ? value : weight * mean + (1 - weight) * value;
      return mean;
    });
  }
  function columnsOf(run, name) {
    for (const group of [run.metrics, run.validations]) {
      if (group.columns[name]) return [group.step, group.columns[name]];
    }
    return null;
  }
  function metricChart(name) {
    const weight = Number(state().smooth || 0);
    const lines = [];
    const bands = [];
    const inGroups = new Set();
    if (state().seeds !== "apart") {
      DATA.seeds.forEach((group, number) => {
        const own = group.map(index => columnsOf(DATA.runs[index], name)).filter(Boolean);
        if (own.length < 2) return;
        group.forEach(index => inGroups.add(index));
        const steps = [...new Set(own.flatMap(pair => pair[0]))].sort((a, b) => a - b);
        const maps = own.map(([own, values]) => new Map(own.map((step, index) => [step, smoothed(values, weight)[index]])));
        const at = steps.map(step => maps.map(map => map.get(step)).filter(value => value !== null && value !== undefined));
        const colour = PALETTE[number % PALETTE.length];
        const label = `${group.length} seeds of ${runName(DATA.runs[group[0]])}`;
        lines.push({ label: `${label}, mean`, steps, values: at.map(values => values.length ? values.reduce((a, b) => a + b) / values.length : null), colour });
        bands.push({ label, steps, lows: at.map(values => values.length ? Math.min(...values) : null), highs: at.map(values => values.length ? Math.max(...values) : null), colour });
      });
    }
    DATA.runs.forEach((run, index) => {
      const own = columnsOf(run, name);
      if (!own || inGroups.has(index)) return;
      lines.push({ label: DATA.runs.length > 1 ? runName(run) : ending(name), steps: own[0], values: smoothed(own[1], weight), colour: PALETTE[(index + DATA.seeds.length) % PALETTE.length] });
    });
    return lines.length ? chart(name, lines, { bands }) : null;
  }

  // --- overview ---

  function metricNames() {
    const names = new Set();
    for (const run of DATA.runs) for (const group of [run.metrics, run.validations]) Object.keys(group.columns).forEach(name => names.add(name));
    names.delete("timestamp");
    return [...names].sort();
  }
  function firstMetrics(names) {
    return FIRST.flatMap(wanted => names.filter(name => name === wanted || (!wanted.includes("/") && ending(name) === wanted && !name.startsWith("validation/"))));
  }
  function alarms(run) {
    return run.findings.filter(finding => finding.level === "alarm").length;
  }
  function rewardsOf(run) {
    const name = Object.keys(run.metrics.columns).find(one => ending(one) === "scores");
    return name ? run.metrics.columns[name].filter(value => value !== null) : null;
  }
  function overview() {
    const names = metricNames();
    const rows = DATA.runs.map((run, index) => {
      const seconds = columnsOf(run, "seconds/step");
      const start = run.starts[run.starts.length - 1] || {};
      const count = alarms(run);
      const rewards = rewardsOf(run);
      return [runName(run), run.algorithm, run.state, `${run.step} of ${run.settings["run.steps"] ?? "?"}`, run.score === null ? "" : number(run.score), rewards ? `${number(rewards[0], 3)} to ${number(rewards.at(-1), 3)}` : "",
        seconds ? time(median(seconds[1])) : "", count ? link(`${count} alarm${count > 1 ? "s" : ""}`, { tab: "health", run: index }) : make("span", { class: "good" }, "no alarm"),
        (start.time || "").replace("T", " ").slice(0, 16), (start.host || {}).name || "", start.git ? start.git.commit.slice(0, 9) + (start.git.changed.length ? ` and ${start.git.changed.length} changed files` : "") : ""];
    });
    const parts = [make("h2", {}, DATA.runs.length > 1 ? "Runs" : "Run"),
      table("What the folders say.", ["run", "algorithm", "state", "step", "held-out score", "reward", "a step", "health", "started (UTC)", "machine", "git"], rows)];
    if (DATA.differing.length) {
      const settings = table("Settings that are not the same in all runs.", ["setting", ...DATA.runs.map(runName)], DATA.differing.map(one => [make("code", {}, one.key), ...one.values]));
      parts.push(make("details", { open: DATA.differing.length <= 12 }, make("summary", {}, `What differs: ${DATA.differing.length} settings`), settings));
    }
    const weight = state().smooth || "0";
    const more = (state().more || "").split(",").filter(Boolean);
    const options = names.map(name => make("option", { value: name }));
    const chooser = make("input", { list: "metrics", "aria-label": "Name of a metric to show", placeholder: "metric", onchange: event => {
      if (names.includes(event.target.value)) go({ more: [...more, event.target.value].join(",") });
    } });
    parts.push(make("h2", {}, "Curves"), make("div", { class: "filters" },
      make("label", {}, "Smoothing", make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: weight, onchange: event => go({ smooth: event.target.value }, true) })),
      make("label", {}, "Show another metric", chooser, make("datalist", { id: "metrics" }, options)),
      DATA.seeds.length ? make("label", {}, "Seeds", make("select", { onchange: event => go({ seeds: event.target.value }, true) },
        make("option", { value: "", selected: !state().seeds }, "mean and range"), make("option", { value: "apart", selected: state().seeds === "apart" }, "each"))) : null,
      make("span", { class: "soft" }, "A click on a curve shows the samples of that step.")));
    // What is always 0 (the KL of a step with one update, say) comes last.
    const moves = name => DATA.runs.some(run => (columnsOf(run, name)?.[1] || []).some(value => Math.abs(value) > 1e-6));
    const first = firstMetrics(names);
    const wanted = [...new Set([...more, ...first.filter(moves), ...first])];
    const drawn = wanted.map(metricChart).filter(Boolean);
    parts.push(drawn.length ? make("div", { class: "charts" }, drawn) : make("p", {}, "No metrics were logged (the tracker \"jsonl\" writes metrics.jsonl)."));
    for (const run of DATA.runs) {
      parts.push(make("details", {}, make("summary", {}, `${runName(run)}: starts, versions, settings, console`),
        ...run.starts.map(start => make("pre", {}, `${start.time}  ${(start.host || {}).name || ""}\n${start.command}`)),
        table("Versions", ["package", "version"], Object.entries(run.versions)),
        table("Settings", ["setting", "value"], Object.entries(run.settings)),
        make("pre", {}, run.console.join("\n"))));
    }
    return parts;
  }

  // --- samples ---

  function reward(row) {
    for (const name of ["scores", "costs", "episode_return"]) if (typeof row.values[name] === "number") return row.values[name];
    return null;
  }
  const lengthOf = row => row.response.length;
  const text = (run, pieces) => pieces.map(piece => run.samples.pieces[piece]).join("");
  function filtered(run) {
    const now = state();
    const bound = (value, low, high) => (low === undefined || (value !== null && value >= Number(low))) && (high === undefined || (value !== null && value <= Number(high)));
    const needle = (now.text || "").toLowerCase();
    return run.samples.rows.map((row, index) => [row, index]).filter(([row]) =>
      (!now.data || row.data === now.data) && bound(row.step, now.step ?? now.from, now.step ?? now.to) && bound(reward(row), now.low, now.high)
      && bound(lengthOf(row), now.short, now.long) && (!now.outcome || row.values.outcome === now.outcome)
      && (!needle || text(run, row.response).toLowerCase().includes(needle) || text(run, run.samples.prompts[row.prompt]).toLowerCase().includes(needle)));
  }
  function tokenColumns(run) {
    const names = new Set();
    for (const row of run.samples.rows) Object.keys(row.tokens).forEach(name => names.add(name));
    const order = ["rollout_logprobs", "logprobs", "advantages", "mismatch", "weight_version", "loss_mask", "turn"];
    return [...order.filter(name => names.has(name)), ...[...names].filter(name => !order.includes(name))];
  }
  const MEANINGS = { mismatch: "the trainer's logprob less the engine's, in nats", rollout_logprobs: "of the engine", advantages: "what the update weighs the token with" };
  const NAMES = { rollout_logprobs: "logprob", logprobs: "logprob (trainer)", advantages: "advantage", weight_version: "version", loss_mask: "mask" };
  /** Returns [colour of a value, legend] for a token column over these rows. */
  function colouring(name, rows) {
    const values = rows.flatMap(row => row.response.map((_, index) => at(row.tokens[name], index))).filter(value => typeof value === "number");
    const kinds = [...new Set(values)].sort((a, b) => a - b);
    if (name === "loss_mask") {
      return [value => value === null || value === undefined ? null : value ? "#b9e3c6" : "#d3d7dd", [["#b9e3c6", "trained on"], ["#d3d7dd", "not trained on"]]];
    }
    if (KINDS.includes(name) && kinds.length <= 12) {
      const colours = new Map(kinds.map((kind, index) => [kind, kind === -1 ? "#d3d7dd" : PALETTE[index % PALETTE.length] + "66"]));
      return [value => colours.get(value) ?? null, kinds.map(kind => [colours.get(kind), kind === -1 ? "environment" : `${NAMES[name] || name} ${kind}`])];
    }
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (!values.length) return [() => null, []];
    if (DIVERGING.includes(name)) {
      const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
      const mix = value => value < 0 ? `rgba(220, 80, 60, ${(Math.min(1, -value / most) * 0.85).toFixed(3)})` : `rgba(40, 130, 210, ${(Math.min(1, value / most) * 0.85).toFixed(3)})`;
      return [value => typeof value === "number" ? mix(value) : null, [["ramp:linear-gradient(90deg, rgba(220,80,60,.85), #ffffff, rgba(40,130,210,.85))", `${number(-most, 3)} to ${number(most, 3)}`]]];
    }
    const range = high - low || 1;
    // What is unlikely stands out.
    const mix = value => `rgba(230, 140, 30, ${((high - value) / range * 0.9).toFixed(3)})`;
    return [value => typeof value === "number" ? mix(value) : null, [["ramp:linear-gradient(90deg, rgba(230,140,30,.9), #ffffff)", `${number(low, 3)} to ${number(high, 3)}`]]];
  }
  function legendOf(entries) {
    return make("div", { class: "legend", "aria-label": "Colours" }, entries.map(([colour, label]) => colour.startsWith("ramp:")
      ? make("span", {}, make("i", { class: "ramp", style: `background:${colour.slice(5)}` }), label)
      : make("span", {}, make("i", { style: `background:${colour}` }), label)));
  }
  function tokensOf(run, row, column, colour) {
    const box = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Response, coloured by ${NAMES[column] || column}` });
    let turn = null;
    row.response.forEach((piece, index) => {
      const now = at(row.tokens.turn, index);
      if (now !== undefined && now !== turn) {
        box.append(make("span", { class: "turn" }, now === -1 ? "environment" : `turn ${now + 1}`));
        turn = now;
      }
      const values = Object.entries(row.tokens).map(([name, value]) => `${NAMES[name] || name} ${number(at(value, index))}`).join("\n");
      const back = colour(at(row.tokens[column], index));
      const token = make("span", { title: values, "data-value": at(row.tokens[column], index) ?? "" }, run.samples.pieces[piece] || "\u2205");
      token.style.background = back || "transparent";
      if (!back) token.style.color = "inherit";
      box.append(token);
    });
    return box;
  }
  function rowLine(run, row, index) {
    const beginning = text(run, row.response.slice(0, 60));
    return make("tr", { tabindex: 0, "data-row": index, "aria-selected": String(Number(state().row) === index && state().row !== undefined),
      onclick: () => go({ row: index }, true), onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go({ row: index }, true); } } },
    make("td", { class: "number" }, String(row.step)), make("td", {}, row.data), make("td", { class: "number" }, number(reward(row), 3)), make("td", { class: "number" }, String(lengthOf(row))),
    make("td", {}, row.values.outcome || row.values.finish_reason || ""), make("td", { class: "cut" }, beginning));
  }
  function detail(run, index, column) {
    const row = run.samples.rows[index];
    if (!row) return [make("p", { class: "soft" }, "Choose a row to see its tokens.")];
    const view = state().view || "one";
    const rows = run.samples.rows.map((other, number) => [other, number]);
    const group = rows.filter(([other]) => other.step === row.step && other.data === row.data && other.group === row.group);
    const over = rows.filter(([other]) => other.prompt === row.prompt);
    const these = view === "group" ? group : view === "prompt" ? over : [[row, index]];
    const [colour, legend] = colouring(column, these.map(pair => pair[0]));
    const button = (label, value) => make("button", { "aria-pressed": String(view === value), onclick: () => go({ view: value }, true) }, label);
    const prompt = make("div", { class: "tokens" }, make("span", { class: "prompt" }, text(run, run.samples.prompts[row.prompt])));
    const head = other => `step ${other.step}, ${other.data}, reward ${number(reward(other), 3)}, ${lengthOf(other)} tokens, ${other.values.outcome || ""}`;
    const parts = [make("div", { class: "filters" }, button("This row", "one"), button(`Its group side by side (${group.length})`, "group"), button(`Its prompt over training (${over.length})`, "prompt"),
      link("This step's time", { tab: "time", step: row.step, row: "" })), make("h3", {}, "Prompt"), prompt, legendOf([...legend, ...(MEANINGS[column] ? [["transparent", MEANINGS[column]]] : [])])];
    if (view === "one") {
      parts.push(make("h3", {}, head(row)), tokensOf(run, row, column, colour),
        table("The row's values", ["column", "value"], Object.entries(row.values).map(([name, value]) => [name, typeof value === "number" ? value : String(value)])));
      if (row.meta) parts.push(make("pre", {}, row.meta));
    } else {
      parts.push(make("div", { class: view === "group" ? "side" : "" }, these.slice(0, 64).map(([other, number]) => make("div", {}, make("h3", {}, link(head(other), { row: number, view: "one" })), tokensOf(run, other, column, colour)))));
    }
    return parts;
  }
  function samples() {
    const run = chosenRun();
    const now = state();
    const found = filtered(run);
    const columns = tokenColumns(run);
    const asked = columns.find(name => name === now.colour || NAMES[name] === now.colour);
    const column = asked || columns[0];
    const outcomes = [...new Set(run.samples.rows.map(row => row.values.outcome).filter(Boolean))].sort();
    const sets = [...new Set(run.samples.rows.map(row => row.data))];
    const field = (label, key, extra = {}) => make("label", {}, label, make("input", { type: "number", step: "any", name: key, value: now[key] ?? "", onchange: event => go({ [key]: event.target.value, row: "", ...extra }, true) }));
    const select = (label, key, values, names = {}) => make("label", {}, label, make("select", { name: key, onchange: event => go({ [key]: event.target.value, ...(key === "colour" ? {} : { row: "" }) }, true) },
      key === "colour" ? null : make("option", { value: "" }, "all"), values.map(value => make("option", { value, selected: (key === "colour" ? column : now[key]) === value }, names[value] || value))));
    if (!run.samples.rows.length) return [make("div", { class: "filters" }, runPicker()), make("p", {}, "No samples were recorded (run.samples).")];
    const left = run.samples.recorded - run.samples.rows.length;
    const rate = columnsOf(run, "sequences_per_second");
    const seconds = columnsOf(run, "seconds/step");
    const each = rate && seconds ? Math.round(median(rate[1].map((value, at) => value * seconds[1][at]))) : 0;
    const note = `${found.length} of ${run.samples.rows.length} rows` + (each ? `; of the ${each} responses of a step run.samples = ${run.settings["run.samples"] ?? "?"} groups are recorded` : "") + (left > 0 ? `; ${left.toLocaleString("en")} more are recorded and left out of this page` : "") + (run.samples.every > 1 ? `; every ${run.samples.every}th step is recorded` : "");
    const body = make("tbody", {}, found.slice(0, shown).map(([row, index]) => rowLine(run, row, index)));
    const list = make("div", { class: "list" }, make("table", { "aria-label": "Samples" }, make("thead", {}, make("tr", {}, ["step", "set", "reward", "tokens", "outcome", "response"].map(title => make("th", { scope: "col" }, title)))), body),
      found.length > shown ? make("button", { onclick: () => { shown += SHOWN_ROWS; render(); } }, `Show more (${found.length - shown} are left)`) : null);
    body.addEventListener("keydown", event => {
      const sibling = event.key === "ArrowDown" ? "nextElementSibling" : event.key === "ArrowUp" ? "previousElementSibling" : null;
      if (sibling && event.target[sibling]) { event.preventDefault(); event.target[sibling].focus(); }
    });
    const index = now.row !== undefined ? Number(now.row) : found.length ? found[0][1] : -1;
    return [make("div", { class: "filters", role: "search", "aria-label": "Filter of samples" }, runPicker(), select("Set", "data", sets), field("Step", "step"), field("From step", "from", { step: "" }), field("To step", "to", { step: "" }), field("Reward from", "low"), field("Reward to", "high"), field("Tokens from", "short"), field("Tokens to", "long"),
      select("Outcome", "outcome", outcomes), make("label", {}, "Text", make("input", { name: "text", value: now.text ?? "", onchange: event => go({ text: event.target.value, row: "" }, true) })), select("Colour by", "colour", columns, NAMES),
      make("button", { onclick: () => { location.hash = "#" + new URLSearchParams({ tab: "samples", run: now.run || 0 }); } }, "Clear")),
    make("p", { role: "status", id: "count" }, note), make("div", { class: "two" }, list, make("section", { "aria-label": "The chosen row" }, detail(run, index, column)))];
  }

  // --- time ---

  function phases(run) {
    return Object.keys(run.metrics.columns).filter(name => name.startsWith("seconds/") && !["seconds/step", "seconds/predicted"].includes(name));
  }
  /** A colour on the page's background, opaque: areas lie on one another. */
  function mixed(colour) {
    return `color-mix(in srgb, ${colour} 45%, ${style("--back")})`;
  }
  function colourOf(names, name) {
    return PALETTE[names.indexOf(name) % PALETTE.length];
  }
  function lanes(run, step) {
    const { texts, steps } = run.timeline;
    const spans = steps[step];
    const processes = [...new Set(spans.map(span => texts[span[0]]))].sort((a, b) => (a === "controller") - (b === "controller") || a.localeCompare(b, "en", { numeric: true }));
    const calls = [...new Set(spans.filter(span => !texts[span[2]].includes("/") && texts[span[0]] !== "controller").map(span => `${texts[span[1]]}/${texts[span[2]]}`))].sort();
    const end = Math.max(...spans.map(span => span[3] + span[4]), 1);
    const [left, width, height] = [150, 1000, 34];
    const x = value => left + value / end * width;
    const told = make("p", { role: "status", id: "span" }, "Choose a bar to read what it is.");
    const tell = span => {
      const [process, role, name, cause] = [span[0], span[1], span[2], span[6]].map(index => texts[index]);
      told.textContent = process === "controller" ? `The controller waits ${time(span[4] / 1e3)} for ${cause}.`
        : `${process}: ${role}/${name}, ${time(span[4] / 1e3)} from ${time(span[3] / 1e3)} on` + (cause ? `; before, it waited ${time(span[5] / 1e3)} for ${cause}.` : ".");
    };
    const svg = make("svg:svg", { viewBox: `0 0 ${left + width + 20} ${processes.length * height + 30}`, width: left + width + 20, role: "group", "aria-label": `What each process did in step ${step}` });
    processes.forEach((process, lane) => {
      const y = lane * height + 6;
      svg.append(make("svg:text", { x: 6, y: y + 17 }, process));
      svg.append(make("svg:line", { x1: left, x2: left + width, y1: y + height - 4, y2: y + height - 4, stroke: style("--line") }));
      spans.filter(span => texts[span[0]] === process).forEach(span => {
        const part = texts[span[2]].includes("/");
        const label = `${texts[span[1]]}/${texts[span[2]]}`;
        const waits = process === "controller";
        if (span[5] > 0 && !part) {
          const wait = make("svg:rect", { x: x(span[3] - span[5]), y: y + 11, width: Math.max(x(span[3]) - x(span[3] - span[5]), 0.5), height: 4, fill: style("--line") });
          svg.append(wait);
        }
        const bar = make("svg:rect", { x: x(span[3]), y: part ? y + 15 : y, width: Math.max(span[4] / end * width, 1), height: part ? 9 : waits ? 8 : 24, rx: 2,
          fill: waits ? style("--soft") : colourOf(calls, label.split("/").slice(0, 2).join("/")), "fill-opacity": part ? 1 : waits ? 0.5 : 0.75, stroke: part ? style("--back") : "none",
          tabindex: part || waits ? null : 0, role: "button", "aria-label": `${process}: ${label}, ${time(span[4] / 1e3)}`, onclick: () => tell(span), onfocus: () => tell(span) });
        bar.append(make("svg:title", {}, `${label} ${time(span[4] / 1e3)}`));
        svg.append(bar);
      });
    });
    [0, 0.25, 0.5, 0.75, 1].forEach(share => svg.append(make("svg:text", { class: "soft", x: left + share * width, y: processes.length * height + 24, "text-anchor": "middle" }, time(end * share / 1e3))));
    return [make("div", { class: "legend" }, calls.map(call => make("span", {}, make("i", { style: `background:${colourOf(calls, call)}` }), call)), make("span", {}, make("i", { style: "background:var(--line)" }), "waits")), told, make("div", { class: "lanes", tabindex: 0, role: "region", "aria-label": "Timeline" }, svg)];
  }
  function timeView() {
    const run = chosenRun();
    const parts = [make("div", { class: "filters" }, runPicker(), make("span", { class: "soft" }, "trace.json.gz beside this page opens in ui.perfetto.dev."))];
    const own = phases(run);
    const total = name => run.metrics.columns[name].reduce((sum, value) => sum + (value || 0), 0);
    const top = own.sort((a, b) => total(b) - total(a)).slice(0, 6);
    const step = run.metrics.columns["seconds/step"];
    if (step) {
      // Stacked: each line is the sum of those below it.
      let below = run.metrics.step.map(() => 0);
      const lines = top.map((name, index) => {
        below = below.map((value, at) => value + (run.metrics.columns[name][at] || 0));
        return { label: name.slice("seconds/".length), steps: run.metrics.step, values: below.slice(), own: run.metrics.columns[name], colour: PALETTE[index % PALETTE.length], fill: mixed(PALETTE[index % PALETTE.length]) };
      }).reverse();
      lines.push({ label: "step", steps: run.metrics.step, values: step, colour: style("--text") });
      const predicted = run.metrics.columns["seconds/predicted"];
      if (predicted) lines.push({ label: "predicted", steps: run.metrics.step, values: predicted, colour: style("--alarm"), dash: [6, 4] });
      parts.push(make("h2", {}, "Where a step went"), make("p", { class: "soft" }, "Seconds on the busiest rank. Areas stand on one another: a line is the sum of its call and those below it. What overlaps can exceed the step."), chart("seconds of a step", lines, { height: 260, onclick: "time", fromZero: true }));
      const rows = ["seconds/step", ...top].map(name => {
        const values = run.metrics.columns[name];
        const most = Math.max(...values.slice(1).filter(value => value !== null));
        const planned = name === "seconds/step" ? predicted : run.metrics.columns[name.replace("seconds/", "predicted/")];
        return { name: name.slice("seconds/".length), measured: median(values.slice(1)), most, at: run.metrics.step[values.lastIndexOf(most)], planned: planned ? planned.at(-1) : null };
      }).filter(row => row.measured !== null);
      const planned = rows.some(row => row.planned !== null);
      parts.push(table("Without the first step", ["", "median", "longest", "in step", ...(planned ? ["predicted", "off"] : [])], rows.map(row => [row.name, time(row.measured), time(row.most), link(String(row.at), { step: row.at }),
        ...(!planned ? [] : row.planned === null ? ["", ""] : [time(row.planned), `${(100 * (row.planned / row.measured - 1)).toFixed(0)}%`])])));
    }
    const shownSteps = Object.keys(run.timeline.steps).map(Number).sort((a, b) => a - b);
    if (!shownSteps.length) return [...parts, make("p", {}, "No timeline was recorded (run.timeline_mb).")];
    const wanted = Number(state().step ?? shownSteps[Math.min(1, shownSteps.length - 1)]);
    const nearest = shownSteps.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best);
    const place = shownSteps.indexOf(nearest);
    const move = (label, to) => make("button", { disabled: to < 0 || to >= shownSteps.length, onclick: () => go({ step: shownSteps[to] }, true) }, label);
    parts.push(make("h2", {}, `Step ${nearest}${nearest === 0 ? " (start)" : ""}`), make("div", { class: "filters" }, move("Earlier", place - 1), make("label", {}, "Step", make("select", { name: "lanes", onchange: event => go({ step: event.target.value }, true) }, shownSteps.map(one => make("option", { value: one, selected: one === nearest }, String(one))))), move("Later", place + 1),
      link("Samples of this step", { tab: "samples", step: nearest, row: "" }), make("span", { class: "soft" }, `${shownSteps.length} of ${run.timeline.recorded} recorded steps are in this page.`)), ...lanes(run, nearest));
    const whole = run.timeline.seconds || 1;
    parts.push(make("h2", {}, "Who waited for whom"), table("Over all recorded steps; clocks of several machines may differ.", ["process", "for", "time", "share"], run.timeline.waits.map(([process, cause, seconds]) => [process, cause, time(seconds), `${(100 * seconds / whole).toFixed(1)}%`])),
      make("h2", {}, "How busy each process was"), table("Share of the time of all recorded steps.", ["process", "busy", ""], Object.entries(run.timeline.busy).map(([process, seconds]) => [process, `${(100 * seconds / whole).toFixed(0)}%`, make("span", { class: "bar", style: `width:${Math.min(200, 200 * seconds / whole).toFixed(0)}px` })])));
    return parts;
  }

  // --- memory ---

  function memory() {
    const run = chosenRun();
    const names = Object.keys(run.metrics.columns).filter(name => name.endsWith("_peak_gb"));
    const parts = [make("div", { class: "filters" }, runPicker())];
    for (const pool of run.memory) {
      const gb = bytes => (bytes / 1e9).toPrecision(3);
      parts.push(make("h2", {}, `Pool ${pool.pool}: what was expected`),
        table(`At its fullest, ${pool.when}: ${gb(pool.needed)} of ${gb(pool.usable)} GB (10^9 bytes) of each device.`, ["owner", "GB"], Object.entries(pool.parts).map(([name, bytes]) => [name, gb(bytes)])),
        table("By phase", ["phase", "GB"], Object.entries(pool.phases).map(([name, bytes]) => [name, gb(bytes)])));
    }
    if (!names.length) return [...parts, make("p", {}, "No memory was measured.")];
    const owners = [...new Set(names.map(name => name.split("/")[0]))];
    parts.push(make("h2", {}, "Peaks by phase"), make("div", { class: "charts" }, owners.map(owner => chart(`${owner}: peak memory, GB`, names.filter(name => name.startsWith(owner + "/")).map((name, index) => (
      { label: ending(name).replace("_peak_gb", ""), steps: run.metrics.step, values: run.metrics.columns[name], colour: PALETTE[index % PALETTE.length] })), { onclick: "time" }))));
    const rows = names.map(name => {
      const values = run.metrics.columns[name];
      const most = Math.max(...values.filter(value => value !== null));
      const step = run.metrics.step[values.indexOf(most)];
      return [name.split("/")[0], ending(name).replace("_peak_gb", ""), most, link(String(step), { tab: "time", step })];
    });
    parts.push(table("The most memory of any rank, GB (10^9 bytes): allocated on a GPU, resident on a CPU.", ["role", "phase", "most", "in step"], rows));
    return parts;
  }

  // --- health ---

  function health() {
    return DATA.runs.flatMap((run, index) => {
      const parts = [make("h2", {}, runName(run))];
      if (!run.findings.length) parts.push(make("p", { class: "good" }, "No rule has found anything."));
      for (const finding of run.findings) {
        const steps = finding.first === finding.last ? `step ${finding.first}` : `steps ${finding.first} to ${finding.last}`;
        parts.push(make("section", { class: `finding ${finding.level}`, "data-rule": finding.rule }, make("h3", {}, `${finding.level === "alarm" ? "Alarm" : "Note"}: ${finding.rule} (${steps})`), make("p", {}, finding.text), make("p", {}, finding.remedy, " "),
          make("p", {}, link(`Look at step ${finding.first}`, { tab: finding.where, run: index, step: finding.where === "overview" ? "" : finding.first, row: "", colour: finding.rule === "mask" ? "loss_mask" : finding.rule === "mismatch" ? "mismatch" : "" }))));
      }
      return parts;
    });
  }

  // --- the page ---

  const VIEWS = { overview, samples, time: timeView, memory, health };
  function render() {
    const tab = TABS.includes(state().tab) ? state().tab : "overview";
    const tabs = document.getElementById("tabs");
    const focused = document.activeElement && document.activeElement.getAttribute("role") === "tab";
    tabs.replaceChildren(...TABS.map(name => {
      const count = name === "health" ? DATA.runs.reduce((sum, run) => sum + alarms(run), 0) : 0;
      return make("button", { role: "tab", id: `tab-${name}`, "aria-selected": String(name === tab), "aria-controls": "main", tabindex: name === tab ? 0 : -1, onclick: () => go({ tab: name }) },
        name[0].toUpperCase() + name.slice(1) + (count ? ` (${count})` : ""));
    }));
    if (focused) document.getElementById(`tab-${tab}`).focus();
    main.setAttribute("role", "tabpanel");
    main.setAttribute("aria-labelledby", `tab-${tab}`);
    const list = main.querySelector(".list");
    const scrolled = list ? list.scrollTop : 0;
    const inList = list && list.contains(document.activeElement) ? document.activeElement.getAttribute("data-row") : null;
    charts = [];
    main.replaceChildren(...VIEWS[tab]().filter(Boolean));
    draw();
    const again = main.querySelector(".list");
    if (again) {
      again.scrollTop = scrolled;
      if (inList !== null) again.querySelector(`[data-row="${inList}"]`)?.focus({ preventScroll: true });
    }
    document.getElementById("subtitle").textContent = `${DATA.runs.length} run${DATA.runs.length > 1 ? "s" : ""}; made by hybridflow ${DATA.version}, ${DATA.made}`;
    document.body.setAttribute("data-tab", tab);
  }
  document.getElementById("tabs").addEventListener("keydown", event => {
    const now = TABS.indexOf(document.body.getAttribute("data-tab"));
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    go({ tab: TABS[(next + TABS.length) % TABS.length] });
  });
  async function unpacked(encoded) {
    const bytes = Uint8Array.from(atob(encoded), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
  async function follow(address) {
    let seen = DATA.made;
    for (;;) {
      await new Promise(done => setTimeout(done, 3000));
      try {
        const next = await (await fetch(address)).json();
        if (next.made === seen) continue;
        seen = next.made;
        DATA = next;
        const editing = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
        if (!editing) render();
      } catch (error) {
        document.getElementById("subtitle").textContent = "The run is not being served any more; this is what was there last.";
      }
    }
  }
  unpacked(document.getElementById("data").textContent).then(data => {
    DATA = data;
    window.addEventListener("hashchange", render);
    let timer = null;
    window.addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(render, 200); });
    render();
    if (DATA.live) follow(DATA.live);
  });
})();
