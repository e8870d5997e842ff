// All about one run: how far it is, samples, events, log, processes, checkpoints, settings.

import { stragglerTable, timeFigure } from "./account.js";
import { actionBar } from "./actions.js";
import { getJson, stopped } from "./api.js";
import { cssColour } from "./charts.js";
import { byId } from "./dom.js";
import {
  choice, dot, element, numberCell, numberHead, tableCard, tomlText,
} from "./elements.js";
import {
  byteSize, count, fixed, gibibytes, missing, percent, plainNumber, significant, span, wholeNumber,
} from "./numbers.js";

const PARTS = [
  ["overview", "Overview"], ["samples", "Samples"], ["events", "Events"], ["log", "Log"],
  ["processes", "Processes"], ["checkpoints", "Checkpoints"], ["settings", "Settings"],
];
/** Milliseconds between two looks at a run that is open. */
const PAUSE = 2000;
const LOG_LINES = 200;

/** What is known of runs beyond their rows; asked for when it is needed, and anew when they change. */
export class About {
  constructor({ onchange, onfailure }) {
    Object.assign(this, { onchange, onfailure });
    this.known = new Map();
    this.asked = new Map();
  }

  get(id) {
    return this.known.get(id)?.value ?? null;
  }

  /** Ask for a run unless what is known is of this revision, or was just asked for. */
  want({ id, revision }) {
    const known = this.known.get(id), now = performance.now();
    if (known?.revision === revision) return;
    if (now - (this.asked.get(id) ?? -Infinity) < PAUSE) {
      this.later ??= setTimeout(() => { this.later = null; this.onchange(null); }, PAUSE);
      return;
    }
    this.asked.set(id, now);
    getJson(`api/run/${id}`).then((value) => {
      this.known.set(id, { value, revision });
      this.onchange(id);
    }, (error) => { if (!stopped(error)) this.onfailure(error); });
  }
}

export class Details {
  constructor({ runs, view, about, onfailure }) {
    Object.assign(this, { runs, view, about, onfailure });
    this.place = byId("run");
    this.drawn = "";
    /** The step of the samples that are shown; null: the newest. */
    this.step = null;
    this.log = { id: "", lines: null, revision: null };
    this.levels = "all";
  }

  /** Draw the open run, if that is what is looked at; only the parts that have changed. */
  update() {
    if (this.view.tab !== "run") return;
    const row = this.runs.rows.get(this.view.open);
    if (!row) {
      this.drawn = "";
      const text = this.view.open ? "This run is not there any more." : "Choose a run from the list.";
      this.place.replaceChildren(element("p", { class: "empty" }, text));
      return;
    }
    this.about.want(row);
    const value = this.about.get(row.id);
    if (this.drawn !== row.id) this.build(row);
    this.fillHead(row, value);
    const part = PARTS.some(([name]) => name === this.view.part) ? this.view.part : "overview";
    this.parts.press(part);
    if (part === "log") this.wantLog(row);
    const facts = [part, part === "overview" ? row : null, part === "log" ? this.log.lines : null,
      this.step, this.levels, value];
    const state = JSON.stringify(facts);
    if (state === this.bodyState) return;
    this.bodyState = state;
    const made = value ? this[`${part}Of`](row, value) : [element("p", { class: "empty" }, "Reading …")];
    const scroller = this.body.querySelector(".logged");
    const atEnd = !scroller || scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 30;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.id : "";
    this.body.replaceChildren(...made.flat().filter(Boolean));
    if (focused) byId(focused)?.focus({ preventScroll: true });
    const log = this.body.querySelector(".logged");
    if (log) log.scrollTop = atEnd ? log.scrollHeight : scroller.scrollTop;
  }

  build(row) {
    this.drawn = row.id;
    this.bodyState = "";
    this.step = null;
    this.head = element("header", { class: "run-head" });
    this.parts = choice("Part", PARTS, this.view.part, (part) => this.view.set({ part }));
    this.parts.node.classList.add("parts");
    this.body = element("div", { class: "run-body" });
    this.actions = element("div", {});
    this.headState = "";
    this.place.replaceChildren(this.head, this.actions, this.parts.node, this.body);
    this.actionState = "";
  }

  fillHead(row, value) {
    const { environment = {} } = value ?? {};
    const { device, host, started, commit } = environment;
    const words = [
      device, host, started && `started ${String(started).slice(0, 16).replace("T", " ")}`,
      commit && `commit ${String(commit).slice(0, 10)}`, row.reason,
    ].filter(Boolean).map(String);
    const state = JSON.stringify([row, words]);
    if (state !== this.headState) {
      this.headState = state;
      const done = row.steps ? Math.min(1, row.step / row.steps) : null;
      const bar = element("i", {});
      bar.style.width = `${100 * (done ?? 0)}%`;
      const left = row.state === "running" && !missing(row.eta) ? `, ${span(row.eta)} left` : "";
      const progress = done === null ? null : element("div", { class: "big-progress" },
        element("div", { class: "progress", role: "progressbar", "aria-label": "Steps",
          "aria-valuenow": Math.round(100 * done) }, bar),
        element("span", {}, `${wholeNumber(row.step)} of ${wholeNumber(row.steps)} steps${left}`));
      this.head.replaceChildren(
        element("h2", {}, dot(cssColour(this.runs.colourOf(row.id))), row.name,
          element("span", { class: `pill ${row.state}` }, row.state),
          element("button", { type: "button", class: "small", onclick: () => this.showAlone(row.id) },
            "Show only this run")),
        element("p", { class: "words" }, words.map((word) => element("span", {}, word)),
          element("span", { class: "mono" }, row.folder)), ...[progress].filter(Boolean));
    }
    const can = this.runs.control && ["running", "silent"].includes(row.state);
    const wanted = JSON.stringify([can, row.state, this.runs.control]);
    if (wanted === this.actionState) return;
    this.actionState = wanted;
    this.actions.replaceChildren(...(can ? [actionBar(row, () => this.runs.rows.get(row.id))] : []));
  }

  showAlone(id) {
    this.view.set({ runs: [id], hide: [], tab: "charts" });
  }

  overviewOf(row, { summary = {}, environment = {}, time, evaluations, stragglers = [], damaged }) {
    const { planned } = summary, beside = (show, value) => missing(value) ? "" : `${show(value)} planned`;
    const rows = [
      ["Loss", fixed(4)(row.loss), "mean of the last records"],
      ["Best validation loss", fixed(4)(row.validation ?? summary.best_loss),
        missing(summary.best_step) ? "" : `at step ${wholeNumber(summary.best_step)}`],
      ["Tokens", count(row.tokens), row.step ? `in ${wholeNumber(row.step)} steps` : ""],
      ["Tokens per second", count(row.tokens_per_second), [
        missing(row.mfu) ? "" : `MFU ${percent(row.mfu)}`, beside(count, planned?.tokens_per_second),
      ].filter(Boolean).join(", ")],
      ["Time", span(row.seconds), "first to last record"],
      ["Goodput", percent(row.goodput ?? time?.goodput), "of the wall time"],
      ["Peak memory", gibibytes(summary.memory_bytes),
        beside(gibibytes, planned?.memory_bytes) || "on the device"],
      ["Skipped steps", wholeNumber(summary.skipped), ""],
      ["Parameters", count(environment.parameters), ""],
    ].filter(([, value]) => value !== "–");
    const tiles = element("div", { class: "tiles" }, rows.map(([name, value, note]) =>
      element("div", { class: "card tile" }, element("span", {}, name), element("strong", {}, value),
        element("span", {}, note))));
    const lines = damaged === 1 ? "line" : "lines";
    return [
      damaged ? element("p", { class: "note warning" },
        `${wholeNumber(damaged)} damaged ${lines} of metrics.jsonl left out.`) : null,
      tiles,
      ...(time ? [element("h3", {}, "Where the time went"), timeFigure(time)] : []),
      ...(stragglers.length ? [element("h3", {}, "Slow processes"), stragglerTable(stragglers)] : []),
      ...scoresOf(evaluations),
    ];
  }

  samplesOf(row, { samples = [], sample_steps: steps = [] }) {
    if (!steps.length && !samples.length) return [nothing("No samples yet. [sample] in the run file asks for them.")];
    const all = steps.length ? steps : samples.map(({ step }) => step);
    const at = this.step === null ? all.length - 1 : nearestStep(all, this.step);
    const step = all[at];
    const held = samples.find((one) => one.step === step) ?? this.asked?.[`${row.id} ${step}`];
    if (!held) this.wantSamples(row.id, step);
    const go = (index) => {
      this.step = index >= all.length - 1 ? null : all[Math.max(0, index)];
      this.update();
    };
    const slider = element("input", { type: "range", id: "sample-step", min: 0, max: all.length - 1,
      step: 1, value: at, "aria-label": "Step of the samples", "aria-valuetext": `step ${wholeNumber(step)}`,
      oninput: (event) => go(+event.target.value) });
    const newest = element("button", { type: "button", class: "small", id: "sample-newest",
      disabled: this.step === null, onclick: () => go(all.length - 1) }, "Newest");
    return [element("div", { class: "bar" }, slider,
      element("output", {}, `step ${wholeNumber(step)}${this.step === null ? ", the newest" : ""}`), newest),
    ...(held?.texts ?? []).map(({ prompt, text }) => element("div", { class: "card sample" },
      element("b", {}, prompt), text)),
    held ? null : element("p", { class: "empty" }, "Reading …")];
  }

  wantSamples(id, step) {
    const key = `${id} ${step}`;
    this.asked ??= {};
    this.waiting ??= new Set();
    if (this.waiting.has(key)) return;
    this.waiting.add(key);
    getJson(`api/run/${id}/samples?step=${step}`).then((found) => {
      this.asked[key] = found;
      this.bodyState = "";
      this.update();
    }, this.onfailure).finally(() => this.waiting.delete(key));
  }

  eventsOf(row, { events }) {
    const newest = [...(events?.newest ?? [])].reverse();
    if (!newest.length) return [nothing("Nothing has happened yet.")];
    const levels = choice("Level", [["all", "All"], ["warnings", "Warnings and errors"]], this.levels,
      (levels_) => { this.levels = levels_; this.update(); });
    const shown = newest.filter(({ level }) => this.levels === "all" || level !== "info");
    const rows = shown.map(({ step, time, level, text }) => [
      element("td", { class: "moment" }, clock(time)),
      element("td", { class: "moment number" }, wholeNumber(step)),
      element("td", { class: level }, level), text]);
    const left = events.total > newest.length
      ? `The newest ${newest.length} of ${wholeNumber(events.total)}; metrics.jsonl holds all.` : null;
    return [levels.node, left ? element("p", { class: "note" }, left) : null,
      tableCard(["Time", numberHead("Step"), "Level", "Event"], rows, "Events")];
  }

  logOf() {
    if (!this.log.lines) return [element("p", { class: "empty" }, "Reading …")];
    if (!this.log.lines.length) return [nothing("train.log is empty.")];
    return [element("p", { class: "note" }, `The last ${this.log.lines.length} lines of train.log.`),
      element("pre", { class: "card logged", tabindex: "0", role: "log", "aria-label": "Log",
        "aria-live": "off" }, this.log.lines.join("\n"))];
  }

  wantLog({ id, revision }) {
    if (this.log.id === id && (this.log.revision === revision || this.log.busy)) return;
    if (this.log.id !== id) this.log = { id, lines: null };
    const { log } = this;
    log.busy = true;
    getJson(`api/run/${id}/log?lines=${LOG_LINES}`).then(({ lines }) => {
      Object.assign(log, { lines, revision, busy: false });
      this.update();
    }, (error) => {
      log.busy = false;
      this.onfailure(error);
    });
  }

  processesOf(row, { processes, stragglers = [] }) {
    const known = processes?.processes ?? [];
    const slow = stragglers.length
      ? [element("h3", {}, "Slow processes"), stragglerTable(stragglers)] : [];
    if (!known.length) {
      return [nothing("One process, or one that does not tell: several write what they do."), ...slow];
    }
    const age = processes.written ? Math.max(0, Date.now() / 1000 - processes.written) : null;
    const part = (one, name) => numberCell(one.parts ? seconds(one.parts[name]) : "–");
    const rows = known.map((one) => element("tr", { class: one.silence > 30 ? "differs" : null },
      numberCell(String(one.rank)), element("td", {}, one.host ?? "–"),
      element("td", { class: one.state === "lost" ? "failed" : null }, one.state ?? "–"),
      element("td", {}, missing(one.seconds) ? one.phase ?? "–" : `${one.phase ?? "–"}, ${span(one.seconds)}`),
      numberCell(wholeNumber(one.step)), numberCell(missing(one.silence) ? "–" : span(one.silence)),
      numberCell(seconds(one.step_seconds)),
      ...["data", "compute", "wait", "optimizer"].map((name) => part(one, name))));
    const head = [numberHead("Rank"), "Host", "State", "Phase, since", numberHead("Step"),
      numberHead("Last heard"), numberHead("Step time"), numberHead("Data"), numberHead("Compute"),
      numberHead("Wait"), numberHead("Optimizer")];
    const note = age === null ? null
      : element("p", { class: age > 60 ? "note warning" : "note" }, `As of ${span(Math.round(age))} ago.`);
    return [note, tableCard(head, rows, "Processes"), ...slow];
  }

  checkpointsOf(row, { checkpoints = [] }) {
    if (!checkpoints.length) return [nothing("No checkpoint yet.")];
    const rows = [...checkpoints].sort((a, b) => b.step - a.step).map(({ step, bytes, time, best }) => [
      numberCell(wholeNumber(step)), element("td", { class: "moment" }, missing(time) ? "–" : clock(time)),
      numberCell(byteSize(bytes)), element("td", { class: best ? "best" : null }, best ? "best" : "")]);
    return [tableCard([numberHead("Step"), "Time", numberHead("Size"), "Validation"], rows, "Checkpoints")];
  }

  settingsOf(row, { settings, environment = {} }) {
    const rows = Object.entries(environment).map(([name, value]) => [
      element("th", { scope: "row" }, name),
      element("td", { class: "mono" }, typeof value === "string" ? value : JSON.stringify(value))]);
    return [settings ? element("div", { class: "card" }, tomlText(settings)) : nothing("run.toml cannot be read."),
      ...(rows.length ? [element("h3", {}, "Environment"), tableCard(null, rows, "Environment")] : [])];
  }
}

const nothing = (text) => element("p", { class: "empty" }, text);
const seconds = (value) => missing(value) ? "–" : span(value);
const clock = (time) => {
  const date = typeof time === "number" ? new Date(time * 1000) : new Date(time);
  return Number.isNaN(date.getTime()) ? String(time) : date.toLocaleString("sv").slice(0, 19);
};

function nearestStep(steps, wanted) {
  let best = 0;
  steps.forEach((step, index) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index;
  });
  return best;
}

function scoresOf(evaluations) {
  if (!evaluations?.length) return [];
  const rows = evaluations.map(({ on, measure, value, stderr, step, size }) => [
    element("th", { scope: "row" }, on), String(measure).replaceAll("_", " "),
    numberCell(missing(stderr) ? plainNumber(value) : `${plainNumber(value)} ± ${significant(2)(stderr)}`),
    numberCell(wholeNumber(step)), size ?? ""]);
  return [element("h3", {}, "Newest evaluations"),
    tableCard(["On", "Measure", numberHead("Value"), numberHead("Step"), "Of"], rows, "Newest evaluations")];
}
