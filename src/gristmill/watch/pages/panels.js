// The charts of the page: which there are, and what each of them shows.

import { chartOf, MARKER_COLOURS, markerKind, PART_DASHES, SECTIONS } from "./catalog.js";
import { Board, cssColour, seriesColour, valueText } from "./charts.js";
import { grouped, smoothed } from "./curves.js";
import { byId } from "./dom.js";
import { dot, element, tableCard } from "./elements.js";
import { AXES } from "./numbers.js";

export class Panels {
  /** `store.get(run, name)` has the curves; `groups()` says which runs are one line, or null;
   * `about(run)` is what is known of a run beyond its row. */
  constructor({ runs, view, store, groups, about }) {
    Object.assign(this, { runs, view, store, groups, about });
    this.place = byId("panels");
    this.sections = new Map();
    this.charts = new Map();
    /** Names of curves by chart: those of several hosts share one. */
    this.names = new Map();
    this.stale = new Set();
    this.pending = 0;
    this.seen = null;
    this.board = new Board({
      onzoom: (zoom) => this.view.set({ zoom }),
      onvisible: (chart) => { this.stale.add(chart.spec.id); this.schedule(); this.store.pump(); },
      onpoint: (place) => this.point(place),
      onlog: ({ spec }) => {
        const { log } = this.view;
        const kept = log.filter((id) => id !== spec.id);
        this.view.set({ log: kept.length < log.length ? kept : [...log, spec.id] });
      },
    });
    byId("values").addEventListener("toggle", () => this.showValues());
  }

  /** The names of curves that are looked at just now. */
  wanted() {
    const found = new Set();
    for (const chart of this.board.charts) {
      if (!chart.visible) continue;
      for (const name of this.names.get(chart.spec.id) ?? []) found.add(name);
      if (chart.spec.overlay && !this.groups()) found.add(chart.spec.overlay);
    }
    return [...found];
  }

  /** Bring charts and sections in line with the runs and the view. */
  arrange() {
    const { board, view } = this;
    Object.assign(board, { axis: view.x, logX: view.logx, zoom: view.zoom });
    const specs = this.specs();
    for (const [id, chart] of this.charts) {
      // What a chart showed when it was last seen must not widen the axis of the others.
      if (!chart.visible) chart.series = [];
      if (specs.has(id)) continue;
      board.remove(chart);
      this.charts.delete(id);
    }
    const sections = SECTIONS.flatMap((title) => {
      const found = [...specs.values()].filter((spec) => spec.section === title)
        .sort((a, b) => a.order - b.order || a.title.localeCompare(b.title));
      return found.length ? [this.sectionOf(title, found)] : [];
    });
    putChildren(this.place, sections);
    this.refresh();
  }

  /** The charts that there should be, by id. */
  specs() {
    const pattern = patternOf(this.view.filter);
    const names = new Set(this.runs.shown().flatMap((row) => row.names));
    const specs = new Map();
    this.names.clear();
    for (const name of [...names].sort()) {
      const spec = chartOf(name);
      if (!pattern.test(name) && !pattern.test(spec.title)) continue;
      if (!this.names.has(spec.id)) this.names.set(spec.id, []);
      this.names.get(spec.id).push(name);
      if (!specs.has(spec.id)) specs.set(spec.id, spec);
    }
    return specs;
  }

  sectionOf(title, specs) {
    let section = this.sections.get(title);
    if (!section) {
      section = element("details", { class: "section" }, element("summary", {}, element("h2", {}, title),
        element("span", { class: "hint" })), element("div", { class: "charts" }));
      section.addEventListener("toggle", () => {
        const { shut, filter } = this.view;
        // The page itself opens and closes them too.
        if (filter || section.open !== shut.includes(title)) return;
        this.view.set({ shut: section.open ? shut.filter((one) => one !== title) : [...shut, title] });
      });
      this.sections.set(title, section);
    }
    section.open = Boolean(this.view.filter) || !this.view.shut.includes(title);
    section.querySelector(".hint").textContent = specs.length > 1 ? String(specs.length) : "";
    const grid = section.lastElementChild;
    const figures = specs.map((spec) => {
      if (!this.charts.has(spec.id)) this.charts.set(spec.id, this.board.add(spec));
      const chart = this.charts.get(spec.id);
      const flipped = this.view.log.includes(spec.id);
      if (chart.logarithmic !== (flipped !== Boolean(spec.log))) chart.setLog(!chart.logarithmic);
      return chart.figure;
    });
    putChildren(grid, figures);
    return section;
  }

  /** Curves of these names have changed; without names, all. */
  refresh(names = null) {
    for (const [id, own] of this.names) {
      const { overlay } = this.charts.get(id)?.spec ?? {};
      if (!names || own.some((name) => names.has(name)) || names.has(overlay)) this.stale.add(id);
    }
    this.schedule();
  }

  schedule() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.update();
    });
  }

  update() {
    const markers = this.markers();
    for (const id of this.stale) {
      const chart = this.charts.get(id);
      if (!chart) this.stale.delete(id);
      if (!chart?.visible) continue;
      this.stale.delete(id);
      const series = this.seriesOf(chart.spec);
      chart.show(series, markers, series.length ? "" : this.waiting(id) ? "…" : "No values");
    }
    this.showValues();
  }

  waiting(id) {
    const names = this.names.get(id) ?? [];
    return this.runs.shown().some((row) => names.some((name) =>
      row.names.includes(name) && !this.store.get(row.id, name)));
  }

  seriesOf(spec) {
    const groups = this.groups();
    if (groups) return groups.flatMap((group) => this.groupSeries(spec, group));
    const shown = this.runs.shown();
    return shown.flatMap((row) => {
      const own = (this.names.get(spec.id) ?? []).flatMap((name) => {
        const { part } = chartOf(name);
        return this.lineOf(spec, row, name, { part });
      });
      const checks = spec.overlay && shown.length <= 12
        ? this.lineOf(spec, row, spec.overlay, { part: "validation", dashes: [6, 4] }) : [];
      return [...own, ...checks];
    });
  }

  lineOf(spec, row, name, { part, dashes }) {
    const curve = this.store.get(row.id, name);
    if (!curve?.x.length) return [];
    const weight = spec.smooth && !dashes ? this.view.smooth : 0;
    const names = this.names.get(spec.id) ?? [], several = names.length > 1 || dashes;
    const at = names.indexOf(name), single = this.runs.shown().length === 1;
    // The lines of one run have colours of their own; of several runs, colours tell the run.
    const colour = spec.parted && single ? seriesColour(at) : this.runs.colourOf(row.id);
    if (spec.parted && !single) dashes = PART_DASHES[at % PART_DASHES.length];
    return [{
      key: row.id, label: part && (several || spec.parted) ? `${row.name}, ${part}` : row.name,
      colour, x: curve.x,
      y: weight ? smoothed(curve.mean, weight) : curve.mean, raw: weight ? curve.mean : null,
      low: curve.low, high: curve.high, dashes, whiskers: spec.whiskers,
      sparse: spec.sparse || name.startsWith("validation."),
    }];
  }

  groupSeries(spec, { label, ids, index }) {
    const names = this.names.get(spec.id) ?? [];
    const curves = ids.flatMap((id) => names.map((name) => this.store.get(id, name)))
      .filter((curve) => curve?.x.length);
    if (!curves.length) return [];
    const weight = spec.smooth ? this.view.smooth : 0;
    const whole = grouped(curves.map((curve) => weight
      ? { ...curve, mean: smoothed(curve.mean, weight) } : curve));
    return [{ ...whole, key: ids[0], label: `${label} (${ids.length})`, colour: seriesColour(index),
      y: whole.mean, raw: null, group: true, sparse: spec.sparse }];
  }

  /** What happened in the runs that are opened or few: [{ x, kind, colour, text }]. */
  markers() {
    if (this.groups()) return [];
    const shown = this.runs.shown();
    return shown.flatMap((row) => {
      const about = row.id === this.view.open || shown.length <= 3 ? this.about(row.id) : null;
      if (!about) return [];
      const label = shown.length > 1 ? `${row.name}: ` : "";
      return (about.events?.newest ?? []).flatMap((event) => {
        const kind = markerKind(event), x = kind ? placeOf(event, row, about, this.view.x) : NaN;
        if (!Number.isFinite(x)) return [];
        return [{ x, kind, colour: MARKER_COLOURS[kind], text: `${label}${event.text}` }];
      });
    });
  }

  /* ---- values at the crosshair ---- */

  point(place) {
    if (place !== null) this.seen = place;
    if (this.valuesPending) return;
    this.valuesPending = requestAnimationFrame(() => {
      this.valuesPending = 0;
      this.showValues();
    });
  }

  showValues() {
    const values = byId("values");
    if (!values.open) return;
    const place = this.seen ?? this.board.domain()[1];
    const all = this.board.valuesAt(place);
    const labels = new Map();
    for (const { found } of all) {
      for (const { one } of found) if (!labels.has(one.label)) labels.set(one.label, one);
    }
    const { length } = all;
    const rows = [...labels.values()].map((one) => [
      element("th", { scope: "row" }, element("span", { class: "run" }, dot(cssColour(one.colour)),
        one.label)),
      ...all.map(({ chart, found }) => {
        const here = found.find((other) => other.one.label === one.label);
        return element("td", { class: "number" }, here ? valueText(chart.spec, here.one, here.at) : "–");
      }),
    ]);
    values.firstElementChild.textContent = `Values at the crosshair: ${AXES[this.view.x].at(place)}`;
    byId("values-table").replaceChildren(length ? tableCard(["Run", ...all.map(({ chart }) =>
      element("th", { class: "number", scope: "col" }, chart.spec.title))], rows,
    "Values at the crosshair") : element("p", { class: "note" }, "Nothing is shown there."));
  }
}

/** What is in its place already is not moved: it would lose the focus. */
function putChildren(place, children) {
  const same = place.children.length === children.length
    && children.every((child, index) => place.children[index] === child);
  if (!same) place.replaceChildren(...children);
}

/** Where an event lies on an axis. Seconds are those since the first record. */
function placeOf(event, row, about, axis) {
  if (typeof event[axis] === "number") return event[axis];
  const tokens = event.tokens ?? (row.step ? event.step * row.tokens / row.step : NaN);
  if (axis === "tokens") return tokens;
  if (axis === "seconds") return event.time - row.updated + row.seconds;
  const { flops_per_token: flops, parameters } = about.environment ?? {};
  return tokens * (flops ?? 6 * parameters);
}

/** A pattern for names of curves; what is no pattern is looked for as it is. */
export function patternOf(text) {
  try {
    return new RegExp(text, "i");
  } catch {
    return new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
  }
}
