// The report: one page that holds its own data, from top to bottom.

import { followTheme } from "./page_theme.js";
import { stragglerTable, timeFigure, timeTable } from "./account.js";
import {
  chartOf, higherIsBetter, MARKER_COLOURS, markerKind, PART_DASHES, SECTIONS,
} from "./catalog.js";
import { Board, cssColour, seriesColour } from "./charts.js";
import { nearestIndex, smoothed } from "./curves.js";
import { choice, dot, element, numberCell, numberHead, tableCard, tomlText } from "./elements.js";
import {
  AXES, byteSize, count, fixed, gibibytes, missing, percent, significant, span, wholeNumber,
} from "./numbers.js";

const data = JSON.parse(document.getElementById("data").textContent);
const { runs } = data;
const several = runs.length > 1;
const view = { smooth: 0.6, hidden: new Set() };
const runDot = (index) => dot(cssColour(seriesColour(index)));
const runLabel = (index) => element("span", { class: "run" }, runDot(index), runs[index].name);

/* ---- curves ---- */

/** JSON has no NaN: a gap is null there. */
const floats = (list) => list && Float64Array.from(list, (value) => value ?? NaN);

function plotCurves(run, plot, prefix) {
  const x = { step: floats(plot.step), tokens: floats(plot.tokens), seconds: floats(plot.seconds) };
  if (run.flops_per_token) x.flops = x.tokens.map((tokens) => tokens * run.flops_per_token);
  return Object.entries(plot.curves).map(([name, { mean, low, high }]) =>
    [prefix + name, { x, mean: floats(mean), low: floats(low), high: floats(high) }]);
}

/** Scores by step, each with its standard error on both sides. */
function scoreCurves(run, places) {
  return Object.entries(run.scores ?? {}).map(([name, points]) => {
    const at = points.map(({ step }) => nearestIndex(places.step, step));
    const x = { step: floats(points.map(({ step }) => step)) };
    for (const axis of ["tokens", "seconds", "flops"]) {
      if (places[axis]) x[axis] = floats(at.map((index) => places[axis][index]));
    }
    const side = (sign) => floats(points.map(({ value, stderr }) => value + sign * (stderr ?? 0)));
    return [`evaluation.${name}`,
      { x, mean: floats(points.map(({ value }) => value)), low: side(-1), high: side(1) }];
  });
}

for (const run of runs) {
  const train = plotCurves(run, run.train, "");
  const checks = plotCurves(run, run.validation, "validation.");
  run.places = (train[0] ?? checks[0])?.[1].x ?? { step: [], tokens: [], seconds: [], flops: [] };
  const parts = Object.entries(run.parts ?? {}).flatMap(([prefix, plot]) => plotCurves(run, plot, prefix));
  run.curves = new Map([...train, ...checks, ...parts, ...scoreCurves(run, run.places)]);
}

/** Workers that always move all the way need no curve of it, and zeros tell nothing. */
function tells(name) {
  const curves = runs.map((run) => run.curves.get(name)).filter(Boolean);
  const values = curves.flatMap(({ mean }) => Array.from(mean)).filter((value) => !Number.isNaN(value));
  if (name === "mixing") return values.some((value) => value !== 1);
  if (name === "sync_wait" || name === "validation.consensus_distance") {
    return runs.some((run) => run.curves.has("sent_bytes") && run.curves.has(name));
  }
  if (name.startsWith("evaluation.")) return curves.some(({ mean }) => mean.length > 1);
  if (name === "skipped" || name === "nan") return values.some((value) => value > 0);
  // The loss chart has it too.
  return name !== "validation.loss" || !runs.some((run) => run.curves.has("loss"));
}

const board = new Board({});
/** The curves of charts that show several things, by the id of the chart. */
const partNames = new Map();

/** The lines of one run for each source, or each set of validation text. */
function partSeries(spec, index) {
  return partNames.get(spec.id).flatMap((name, at) => {
    const { part } = chartOf(name), label = several ? `${runs[index].name}, ${part}` : part;
    // Of several runs, colours tell the run.
    const look = several ? { dashes: PART_DASHES[at % PART_DASHES.length] } : {};
    return curveSeries(name, spec, index, { label }).map((one) =>
      ({ ...one, ...look, colour: seriesColour(several ? index : at) }));
  });
}

function curveSeries(name, spec, index, { label, dashes = null }) {
  const run = runs[index], curve = run.curves.get(name);
  if (!curve || !curve.x[board.axis]) return [];
  const weight = spec.smooth && !dashes ? view.smooth : 0;
  const sparse = name.startsWith("validation.") || Boolean(spec.sparse);
  const single = name === "validation.loss" && !several ? "--c1" : seriesColour(index);
  return [{
    key: index, label, colour: single, x: curve.x[board.axis],
    y: weight ? smoothed(curve.mean, weight) : curve.mean, raw: weight ? curve.mean : null,
    low: curve.low, high: curve.high, sparse, whiskers: spec.whiskers, dashes,
  }];
}

function seriesOf(spec) {
  return runs.flatMap((run, index) => {
    if (view.hidden.has(index)) return [];
    if (partNames.has(spec.id)) return partSeries(spec, index);
    const validated = spec.overlay && run.curves.has(spec.overlay);
    const single = spec.overlay ? "training" : spec.title;
    const own = curveSeries(spec.id, spec, index, { label: several ? run.name : single });
    if (!validated) return own;
    return [...own, ...curveSeries(spec.overlay, spec, index, {
      label: several ? `${run.name}, validation` : "validation", dashes: several ? [6, 4] : [],
    })];
  });
}

/** Marks of one run: of several, nobody could tell whose they are. */
function markersOf() {
  if (several) return [];
  const { step: steps } = runs[0].places, places = runs[0].places[board.axis];
  if (!places?.length) return [];
  return runs[0].events.newest.flatMap((event) => {
    const kind = markerKind(event);
    if (!kind) return [];
    return [{ kind, colour: MARKER_COLOURS[kind], text: event.text,
      x: board.axis === "step" ? event.step : places[nearestIndex(steps, event.step)] }];
  });
}

function redraw() {
  unzoom.hidden = !board.zoom;
  const markers = markersOf();
  for (const chart of board.charts) chart.show(seriesOf(chart.spec), markers);
}

/* ---- the page, from top to bottom ---- */

function header() {
  if (several) return [element("h1", {}, `${runs.length} runs compared`), summaryTable()];
  const run = runs[0], { device, started, commit } = run.environment;
  const words = [
    device, started && `started ${started.slice(0, 16).replace("T", " ")}`,
    commit && `commit ${commit.slice(0, 10)}`, run.reason,
  ];
  return [
    element("h1", {}, run.name),
    element("p", { class: "facts" }, element("span", { class: `pill ${run.state}` }, run.state),
      words.filter(Boolean).map((word) => element("span", {}, word))),
    element("div", { class: "tiles" }, tiles(run)),
  ];
}
function tiles({ summary, time }) {
  const { planned } = summary, beside = (show, value) => missing(value) ? "" : `, ${show(value)} planned`;
  const speed = summary.mfu === null ? "median" : `median; MFU ${percent(summary.mfu)}`;
  const memory = summary.memory_bytes
    ? `peak memory ${gibibytes(summary.memory_bytes)}${beside(gibibytes, planned?.memory_bytes)}`
    : "first to last record";
  const skipped = summary.skipped ? `${wholeNumber(summary.skipped)} steps skipped` : "no step skipped";
  const rows = [
    ["Best validation loss", fixed(4)(summary.best_loss), `at step ${wholeNumber(summary.best_step)}`],
    ["Perplexity", significant(4)(summary.best_perplexity), "at that step"],
    ["Final validation loss", fixed(4)(summary.final_loss), "the last one measured"],
    ["Training loss", fixed(4)(summary.train_loss), "mean of the last records"],
    ["Tokens seen", count(summary.tokens), `in ${wholeNumber(summary.step)} steps`],
    ["Tokens per second", count(summary.tokens_per_second),
      `${speed}${beside(count, planned?.tokens_per_second)}`],
    ["Wall time", span(summary.seconds), memory],
    ["Goodput", percent(time?.goodput), "of the wall time"],
    ["Parameters", count(summary.parameters), skipped],
  ];
  const tile = ([name, value, note]) => element("div", { class: "card tile" },
    element("span", {}, name), element("strong", {}, value), element("span", {}, note));
  return rows.filter(([, value]) => value !== "–").map(tile);
}
function summaryTable() {
  for (const run of runs) run.summary.goodput = run.time?.goodput ?? null;
  const columns = [
    ["Best validation loss", "best_loss", fixed(4), Math.min],
    ["Perplexity", "best_perplexity", significant(4), Math.min],
    ["Training loss", "train_loss", fixed(4), Math.min],
    ["Steps", "step", wholeNumber],
    ["Tokens", "tokens", count],
    ["Tokens/s", "tokens_per_second", count, Math.max],
    ["MFU", "mfu", percent, Math.max],
    ["Goodput", "goodput", percent, Math.max],
    ["Peak memory", "memory_bytes", gibibytes, Math.min],
    ["Sent", "sent_bytes", byteSize, Math.min],
    ["Wall time", "seconds", span],
    ["Parameters", "parameters", count],
  ].filter(([, field]) => runs.some((run) => !missing(run.summary[field])));
  // Only what reads differently is worth a mark.
  const winner = ([, field, show, choose]) => {
    const known = runs.map((run) => run.summary[field]).filter((value) => !missing(value));
    return choose && new Set(known.map(show)).size > 1 ? show(choose(...known)) : null;
  };
  const best = columns.map(winner);
  const cell = (run) => ([, field, show], column) => {
    const text = show(run.summary[field]);
    return element("td", { class: `number${text === best[column] ? " best" : ""}` }, text);
  };
  const rows = runs.map((run, index) => [element("th", { scope: "row" }, runLabel(index)),
    element("td", { class: run.state }, run.state), ...columns.map(cell(run))]);
  const card = tableCard(["Run", "State", ...columns.map(([name]) => numberHead(name))], rows, "Runs");
  card.classList.add("summary");
  return card;
}
function legend() {
  return element("div", { class: "legend", role: "group", "aria-label": "Runs" },
    runs.map((run, index) => {
      const onclick = (event) => {
        const visible = view.hidden.delete(index);
        if (!visible) view.hidden.add(index);
        event.currentTarget.setAttribute("aria-pressed", visible);
        redraw();
      };
      const attributes = { type: "button", "aria-pressed": "true", title: "Show or hide this run",
        onclick, onpointerenter: () => board.raise(index), onpointerleave: () => board.raise(null) };
      return element("button", attributes, runDot(index), run.name);
    }));
}
const unzoom = element("button", { type: "button", hidden: true, onclick: () => board.zoomTo(null) },
  "Reset zoom");
board.onzoom = (stretch) => { unzoom.hidden = !stretch; };

function controls() {
  const output = element("output", { for: "smooth" }, view.smooth.toFixed(2));
  const oninput = (event) => {
    view.smooth = +event.target.value;
    output.textContent = view.smooth.toFixed(2);
    redraw();
  };
  const slider = { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, oninput,
    value: view.smooth };
  const axes = Object.entries(AXES).filter(([axis]) => runs.some((run) => run.places[axis]?.length))
    .map(([axis, { label }]) => [axis, label]);
  const scales = [[false, "Linear"], [true, "Log"]];
  return element("div", { class: "controls" },
    choice("Across", axes, board.axis, (axis) => {
      board.axis = axis;
      board.zoomTo(null);
      redraw();
    }).node,
    choice("Axis", scales, board.logX, (on) => { board.logX = on; board.zoomTo(null); }).node,
    element("div", { class: "group" }, element("label", { for: "smooth" }, "Smoothing"),
      element("input", slider), output),
    several ? legend() : null, unzoom);
}
function lineKey() {
  const stroke = (colour, dashed) => {
    const line = element("i", { class: dashed ? "dashed" : null });
    if (colour) line.style.color = `var(${colour})`;
    return line;
  };
  return [element("span", {}, stroke(several ? null : "--c0", false), "training"),
    element("span", {}, stroke(several ? null : "--c1", several), "validation")];
}
function chartSections() {
  const names = [...new Set(runs.flatMap((run) => [...run.curves.keys()]))].filter(tells);
  const specs = [];
  for (const name of names) {
    const spec = chartOf(name), known = specs.some(({ id }) => id === spec.id);
    if (spec.parted) partNames.set(spec.id, [...(partNames.get(spec.id) ?? []), name].sort());
    if (!known) specs.push(spec);
  }
  // What waits for others belongs to the exchanges, where there are any.
  for (const spec of specs) {
    if (spec.id === "sync_wait") spec.section = "Exchanges between workers";
  }
  const usual = ["Training", "Speed", "Validation", "Other"];
  const groups = [[null, usual], ...SECTIONS.filter((name) => !usual.includes(name))
    .map((name) => [name === "Evaluations" ? "Scores while training" : name, [name]])];
  return groups.flatMap(([title, sections]) => {
    const found = sections.flatMap((section) => specs.filter((spec) => spec.section === section)
      .sort((a, b) => a.order - b.order));
    if (!found.length) return [];
    const charts = found.map((spec) => board.add(spec));
    const narrow = charts.filter(({ spec }) => !spec.wide);
    if (narrow.length % 2) narrow.at(-1).figure.classList.add("even");
    for (const chart of charts) {
      if (chart.spec.overlay && runs.some((run) => run.curves.has(chart.spec.overlay))) {
        chart.extra.className = "extra key";
        chart.extra.append(...lineKey());
      }
    }
    const grid = element("div", { class: "charts" }, charts.map(({ figure }) => figure));
    return [title ? element("h2", {}, title) : null, grid];
  });
}
function account() {
  const known = runs.map((run, index) => [run.time, index]).filter(([time]) => time);
  if (!known.length) return [];
  const title = element("h2", {}, "Where the time went");
  if (!several) return [title, timeFigure(known[0][0])];
  return [title, ...known.map(([time, index]) => timeFigure(time,
    { name: runs[index].name, colour: cssColour(seriesColour(index)), table: false })),
  timeTable(known.map(([time, index]) => [runLabel(index), time]))];
}
function stragglers() {
  const found = runs.flatMap((run, index) => (run.stragglers ?? []).map((one) => ({ ...one, run: index })));
  if (!found.length) return [];
  return [element("h2", {}, "Slow processes"), stragglerTable(found, several ? runLabel : null)];
}
function evaluations() {
  // Perplexity and loss of one text tell the same; bits per byte compare across tokenizers.
  const told = (entry) => !["loss", "perplexity"].includes(entry.measure) || entry.alone;
  const found = runs.map((run) => {
    const leading = new Set(run.evaluations.filter(({ measure }) =>
      measure === "bits_per_byte" || measure.startsWith("acc")).map(({ on }) => on));
    return run.evaluations.map((entry) => ({ ...entry, alone: !leading.has(entry.on) })).filter(told);
  });
  const titles = [...new Set(found.flat().map(({ on, measure }) => JSON.stringify([on, measure])))];
  if (!titles.length) return [];
  const cards = titles.map((title) => {
    const [on, measure] = JSON.parse(title);
    const entries = found.map((list) => list.find((one) => one.on === on && one.measure === measure));
    return scoreCard(on, measure, entries);
  });
  return [element("h2", {}, "Evaluations"), element("div", { class: "charts" }, cards)];
}
function scoreCard(on, measure, entries) {
  const known = entries.filter(Boolean);
  const most = Math.max(...known.map(({ value, stderr }) => value + (stderr || 0)), 1e-12);
  const full = measure.startsWith("acc") && most <= 1 ? 1 : most;
  const share = (value) => `${Math.max(0, Math.min(100, 100 * value / full)).toFixed(2)}%`;
  const rows = entries.map((entry, index) => {
    if (!entry) return null;
    const { value, stderr, step } = entry;
    const bar = element("i", { class: "filled" });
    bar.style.width = share(value);
    bar.style.background = cssColour(seriesColour(index));
    const whisker = missing(stderr) ? null : element("i", { class: "whisker" });
    if (whisker) {
      whisker.style.left = share(value - stderr);
      whisker.style.right = `calc(100% - ${share(value + stderr)})`;
    }
    const text = missing(stderr) ? significant(4)(value)
      : `${significant(4)(value)} ± ${significant(2)(stderr)}`;
    const name = several ? runLabel(index) : element("span", {}, `step ${wholeNumber(step)}`);
    const label = `${runs[index].name}, step ${wholeNumber(step)}: ${text}`;
    return element("div", { class: "score", role: "img", "aria-label": label, title: label },
      element("span", { class: "of" }, name), element("span", { class: "track" }, bar, whisker),
      element("span", { class: "number" }, text));
  });
  const better = higherIsBetter(measure) ? "higher is better" : "lower is better";
  const words = measure === "bits_per_byte" ? "bits per byte" : measure;
  return element("figure", { class: "card scores" }, element("figcaption", {}, element("h3", {}, on),
    element("small", {}, `${words}, ${better}; ${known[0].size}`)), rows);
}
function samples() {
  const having = runs.map((_, index) => index).filter((index) => runs[index].samples.length);
  if (!having.length) return [];
  let moments = [];
  const texts = element("div"), where = element("output");
  const show = () => {
    const moment = moments[+slider.value];
    where.textContent = `step ${wholeNumber(moment.step)}`;
    texts.replaceChildren(...moment.texts.map(({ prompt, text }) =>
      element("div", { class: "card sample" }, element("b", {}, prompt), text)));
  };
  const choose = (index) => {
    moments = runs[index].samples;
    slider.max = moments.length - 1;
    slider.value = slider.max;
    show();
  };
  const range = { type: "range", min: 0, step: 1, "aria-label": "Step of the samples" };
  const slider = element("input", { ...range, oninput: show });
  const picker = element("select",
    { "aria-label": "Run", onchange: (event) => choose(+event.target.value) },
    having.map((index) => element("option", { value: index }, runs[index].name)));
  choose(having[0]);
  const bar = element("div", { class: "bar" }, having.length > 1 ? picker : null, slider, where);
  return [element("h2", {}, "Samples"), bar, texts];
}
const runLabels = () => runs.map((_, index) => runLabel(index));
const monoCells = (list) => list.map((value) =>
  element("td", { class: "mono" }, missing(value) ? "–" : value));
function settings() {
  const title = element("h2", {}, "Settings");
  if (!several) return [title, element("div", { class: "card" }, tomlText(runs[0].settings))];
  const rows = data.differences.map((row) =>
    [element("th", { class: "mono", scope: "row" }, row.setting), ...monoCells(row.values)]);
  const same = element("p", { class: "note" }, "The settings of these runs are the same.");
  const whole = runs.map((run, index) => element("details", { class: "card" },
    element("summary", {}, runLabel(index)), tomlText(run.settings)));
  const differing = rows.length
    ? tableCard(["Setting", ...runLabels()], rows, "Settings that differ") : same;
  return [title, differing, ...whole];
}
function environment() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.environment)))];
  const rows = names.map((name) => {
    const found = runs.map((run) => run.environment[name]);
    const differs = new Set(found).size > 1 ? "differs" : null;
    return element("tr", { class: differs }, element("th", { scope: "row" }, name), monoCells(found));
  });
  if (!rows.length) return [];
  return [element("h2", {}, "Environment"),
    tableCard(several ? ["", ...runLabels()] : null, rows, "Environment")];
}
function events() {
  const found = runs.flatMap((run, index) => run.events.newest.map((event) => ({ ...event, index })));
  if (!found.length) return [];
  const total = runs.reduce((sum, run) => sum + run.events.total, 0);
  const clock = (seconds) => new Date(seconds * 1000).toLocaleString("sv").slice(0, 16);
  const rows = found.sort((a, b) => b.time - a.time).map((event) => [
    ...(several ? [element("td", {}, runLabel(event.index))] : []),
    element("td", { class: "moment" }, clock(event.time)),
    element("td", { class: "moment" }, wholeNumber(event.step)),
    element("td", { class: event.level }, event.level), event.text]);
  const left = `The newest ${found.length} of ${total}; metrics.jsonl holds all.`;
  const note = total > found.length ? element("p", { class: "note" }, left) : null;
  const head = [...(several ? ["Run"] : []), "Time", "Step", "Level", "Event"];
  return [element("h2", {}, "Events"), note, tableCard(head, rows, "Events")];
}
function footer() {
  const made = data.made.slice(0, 16).replace("T", " ");
  const help = "Drag across a chart to zoom, double-click to go back. With the keyboard: "
    + "arrows move the crosshair, + and - zoom, 0 goes back.";
  return element("footer", {}, `Made with Gristmill on ${made}. ${help}`);
}

const parts = [header(), controls(), chartSections(), account(), stragglers(), evaluations(),
  samples(), settings(), environment(), events(), footer()];
document.getElementById("page").replaceChildren(...parts.flat().filter(Boolean));

followTheme();
redraw();
