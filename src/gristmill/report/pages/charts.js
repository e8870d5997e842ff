// Charts that share an x axis, a zoom and a crosshair. The report and the live page draw with them.
//
//   board = new Board({ onzoom, onpoint, onvisible, onlog })
//   chart = board.add({ id, title, unit, show, … })     chart.figure goes into the page
//   chart.show(series, markers)                         draws when it is seen
//
// A series is { key, label, colour, x, y, raw, low, high, dashes, sparse, whiskers, group }: arrays
// of one length, NaN where there is no value. `colour` is a colour or the name of a CSS variable.

import { extentOf, nearestIndex, stretchOf } from "./curves.js";
import { dot, element } from "./elements.js";
import { AXES } from "./numbers.js";
import { describeChart, frameOf, paintChart, paintPointer } from "./painting.js";

/** Rows of the card beside the pointer; the table of values has all. */
const MOST_ROWS = 14;
/** The colours of the first runs; further ones go around the circle of hues. */
const NAMED_COLOURS = 8;

/** The colour of the n-th run. */
export function seriesColour(index) {
  if (index < NAMED_COLOURS) return `--c${index}`;
  return `hue:${Math.round((index * 137.508) % 360)}`;
}
/** The same for style sheets. */
export function cssColour(colour) {
  if (colour.startsWith("--")) return `var(${colour})`;
  if (!colour.startsWith("hue:")) return colour;
  return `oklch(var(--run-lightness) 0.13 ${colour.slice(4)})`;
}

/** Looks up what CSS variables stand for just now, since a canvas does not know them. */
class Paints {
  constructor() {
    this.probe = element("span", { hidden: true });
    document.body.append(this.probe);
    this.known = new Map();
    this.of = (colour) => {
      let found = this.known.get(colour);
      if (!found) {
        this.probe.style.color = cssColour(colour);
        found = getComputedStyle(this.probe).color;
        this.known.set(colour, found);
      }
      return found;
    };
  }
}

export class Board {
  constructor({ onzoom, onpoint, onvisible, onlog } = {}) {
    Object.assign(this, { onzoom, onpoint, onvisible, onlog });
    this.axis = "step";
    this.logX = false;
    /** The stretch that is looked at; null: all. */
    this.zoom = null;
    this.place = null;
    this.raised = null;
    this.charts = [];
    this.paints = new Paints();
    this.pending = 0;
    this.font = "11.5px sans-serif";
    const options = { rootMargin: "240px 0px" };
    this.watcher = new IntersectionObserver((entries) => this.seen(entries), options);
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) target.chart.dirty = true;
      this.schedule();
    });
    addEventListener("beforeprint", () => this.draw(true));
    const recolour = () => { this.paints.known.clear(); this.refresh(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
    new MutationObserver(recolour).observe(document.documentElement,
      { attributes: true, attributeFilter: ["data-theme"] });
  }

  add(spec) {
    const chart = new Chart(this, spec);
    this.charts.push(chart);
    this.watcher.observe(chart.figure);
    this.sizes.observe(chart.plot);
    return chart;
  }

  remove(chart) {
    this.charts = this.charts.filter((one) => one !== chart);
    this.watcher.unobserve(chart.figure);
    this.sizes.unobserve(chart.plot);
    chart.figure.remove();
  }

  seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const { chart } = target;
      if (chart.visible === isIntersecting) continue;
      chart.visible = isIntersecting;
      if (isIntersecting) this.onvisible?.(chart);
    }
    this.schedule();
  }

  /** Draw everything anew, once, before the next frame. */
  refresh() {
    for (const chart of this.charts) chart.dirty = true;
    this.schedule();
  }

  schedule() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw(false);
    });
  }

  /** All charts span the same stretch, so that one crosshair means the same place in each. */
  domain() {
    if (this.zoom) return this.zoom;
    return stretchOf(this.charts.flatMap((chart) => chart.series), this.logX);
  }

  draw(everything) {
    const domain = this.domain();
    if (this.drawn?.join() !== domain.join()) for (const chart of this.charts) chart.dirty = true;
    this.drawn = domain;
    for (const chart of this.charts) {
      if ((chart.visible && chart.dirty) || everything) chart.draw(domain);
    }
  }

  zoomTo(stretch, tell = true) {
    this.zoom = stretch;
    this.refresh();
    if (tell) this.onzoom?.(stretch);
  }

  /** Move the crosshair; `chart` is where the pointer is and `y` how high. */
  point(place, chart = null, y = null) {
    this.place = place;
    for (const one of this.charts) if (one.visible) one.point(one === chart, y);
    this.onpoint?.(place);
  }

  /** Let the curves of a run stand out. */
  raise(key) {
    if (this.raised === key) return;
    this.raised = key;
    for (const one of this.charts) if (one.visible) one.point(false, null);
  }

  /** What all charts show at a place, in the order of the page: [{ chart, found: [{ one, at }] }]. */
  valuesAt(place) {
    const follows = (a, b) => a.figure.compareDocumentPosition(b.figure) & 4 ? -1 : 1;
    return [...this.charts].sort(follows).map((chart) => ({ chart, found: chart.valuesAt(place) }))
      .filter(({ found }) => found.length);
  }
}

export class Chart {
  constructor(board, spec) {
    Object.assign(this, { board, spec, series: [], markers: [], visible: false, dirty: true });
    this.logarithmic = Boolean(spec.log);
    this.base = element("canvas", { "aria-hidden": "true" });
    this.overlay = element("canvas", { "aria-hidden": "true" });
    this.plot = element("div", { class: "plot", tabindex: "0", role: "slider",
      "aria-label": spec.title, "aria-valuenow": 0 }, this.base, this.overlay);
    this.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.empty = element("p", { class: "nothing", hidden: true });
    this.extra = element("span", { class: "extra" });
    this.logButton = element("button", { type: "button", class: "small quiet log",
      title: "Logarithmic values", "aria-label": `${spec.title}: logarithmic values`,
      onclick: () => this.setLog(!this.logarithmic, true) }, "log");
    this.title = element("h3", {}, spec.title);
    const caption = element("figcaption", {}, this.title,
      spec.unit ? element("small", {}, spec.unit) : null, this.extra, this.logButton);
    this.figure = element("figure", { class: `card chart${spec.wide ? " wide" : ""}` },
      caption, this.plot, this.empty, this.tip);
    this.figure.chart = this.plot.chart = this;
    this.setLog(this.logarithmic);
    listen(this);
  }

  setLog(on, tell = false) {
    this.logarithmic = on;
    this.logButton.setAttribute("aria-pressed", String(on));
    this.dirty = true;
    this.board.schedule();
    if (tell) this.board.onlog?.(this);
  }

  show(series, markers = [], nothing = "") {
    this.series = series;
    this.markers = markers;
    this.empty.textContent = nothing;
    this.empty.hidden = !nothing;
    this.dirty = true;
    this.board.schedule();
  }

  draw(domain) {
    const { board, spec, series } = this;
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (width < 80 || height < 60) return;
    this.dirty = false;
    const logY = this.logarithmic;
    const extent = extentOf(series, domain,
      { logarithmic: logY, zero: spec.zero, robust: spec.robust });
    this.frame = frameOf({ width, height, domain, extent, logX: board.logX, logY });
    const family = getComputedStyle(this.figure).fontFamily;
    paintChart(this.base, this, this.frame,
      { paint: board.paints.of, font: `11.5px ${family}`, axis: board.axis });
    this.plot.setAttribute("aria-label", describeChart(spec, series, board.axis));
    this.plot.setAttribute("aria-valuemin", domain[0]);
    this.plot.setAttribute("aria-valuemax", domain[1]);
    this.point(false, null);
  }

  /** The values at a place; of runs that ended before it there is none. */
  valuesAt(place) {
    const domain = this.frame?.domain ?? this.board.domain();
    const near = (domain[1] - domain[0]) * 0.02;
    return this.series.flatMap((one) => {
      const { x, y } = one;
      if (!x.length || place < x[0] - near || place > x[x.length - 1] + near) return [];
      const index = nearestIndex(x, place);
      if (Number.isNaN(y[index])) return [];
      const exact = one.raw ? one.raw[index] : y[index];
      const at = { x: x[index], y: y[index], exact, low: one.low?.[index], high: one.high?.[index],
        count: one.counts?.[index] };
      return [{ one, at }];
    });
  }

  /** Draw the crosshair where the board has it, and the card if the pointer is here. */
  point(here, y) {
    const { board, frame } = this;
    if (!frame) return;
    const { place } = board;
    const visible = place !== null && place >= frame.domain[0] && place <= frame.domain[1];
    const found = visible ? this.valuesAt(place) : [];
    const raised = this.series.filter((one) => one.key === board.raised && board.raised !== null);
    paintPointer(this.overlay, frame,
      { place, found, selection: this.selection, raised, paint: board.paints.of });
    if (here && found.length) this.tell(place, found, y);
    else this.tip.hidden = true;
  }

  tell(place, found, y) {
    const { board, frame, spec, tip } = this;
    const axis = AXES[board.axis];
    const away = ({ at }) => Math.abs(frame.toY(at.y) - (y ?? 0));
    const close = y === null ? found[0] : found.reduce((a, b) => away(b) < away(a) ? b : a);
    let rows = found;
    if (found.length > MOST_ROWS) {
      rows = [...found].sort((a, b) => away(a) - away(b)).slice(0, MOST_ROWS);
    }
    if (found.length > 3) rows = [...rows].sort((a, b) => b.at.y - a.at.y);
    const lines = rows.map(({ one, at }) => element("div",
      { class: one === close.one && found.length > 1 ? "close" : null }, dot(cssColour(one.colour)),
      element("span", { class: "name" }, one.label),
      one.sparse ? element("span", { class: "where" }, `(${axis.at(at.x)})`) : null,
      element("b", {}, valueText(spec, one, at))));
    const marks = this.markers.filter(({ x }) => Math.abs(frame.toX(x) - frame.toX(place)) < 5)
      .slice(0, 4).map(({ text }) => element("div", { class: "mark" }, text));
    const rest = found.length - rows.length;
    tip.replaceChildren(element("div", { class: "where" }, axis.at(place)), ...lines, ...marks);
    if (rest) tip.append(element("div", { class: "where" }, `${rest} more in the table of values`));
    tip.hidden = false;
    const x = frame.toX(place) + this.plot.offsetLeft, room = this.figure.clientWidth;
    const fits = x + 14 + tip.offsetWidth <= room;
    tip.style.left = `${fits ? x + 14 : Math.max(4, x - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${this.plot.offsetTop + 10}px`;
  }

  /** The recorded place closest to one, so that the crosshair stands on real values. */
  snapped(place) {
    const [low, high] = this.frame.domain;
    let best = place, distance = Infinity;
    for (const { x } of this.series) {
      if (!x.length) continue;
      const near = x[nearestIndex(x, place)];
      if (near < low || near > high || Math.abs(near - place) >= distance) continue;
      [best, distance] = [near, Math.abs(near - place)];
    }
    return best;
  }

  /** Say the values at the crosshair to a screen reader. */
  say() {
    const { place } = this.board, found = this.valuesAt(place);
    const parts = found.slice(0, 8).map(({ one, at }) =>
      `${one.label}: ${valueText(this.spec, one, at)}`);
    if (found.length > 8) parts.push(`${found.length - 8} more`);
    this.plot.setAttribute("aria-valuenow", place);
    this.plot.setAttribute("aria-valuetext",
      `${AXES[this.board.axis].at(place)}. ${parts.join("; ") || "no value"}`);
  }
}

/** A value with what surrounds it: the unsmoothed one, a group's range, a standard error. */
export function valueText(spec, one, at) {
  const text = spec.show(at.y);
  if (one.group) {
    if (!(at.count > 1)) return text;
    return `${text} (${spec.show(at.low)} to ${spec.show(at.high)}, ${at.count} runs)`;
  }
  if (one.whiskers && at.high > at.y) return `${text} ± ${+(at.high - at.y).toPrecision(2)}`;
  if (one.raw && at.exact !== at.y && !Number.isNaN(at.exact)) {
    return `${spec.show(at.exact)} (smoothed ${text})`;
  }
  return text;
}

/* ---- pointer and keyboard ---- */

function listen(chart) {
  const { plot, board } = chart;
  const placeOf = (event) => chart.frame.fromX(event.clientX - plot.getBoundingClientRect().left);
  let from = null;
  plot.addEventListener("pointermove", (event) => {
    if (!chart.frame) return;
    const place = placeOf(event);
    if (from !== null) chart.selection = [from, place];
    const y = event.clientY - plot.getBoundingClientRect().top;
    board.point(chart.snapped(place), chart, y);
  });
  plot.addEventListener("pointerdown", (event) => {
    if (!chart.frame) return;
    if (event.pointerType !== "mouse") {
      board.point(chart.snapped(placeOf(event)), chart,
        event.clientY - plot.getBoundingClientRect().top);
    }
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    from = placeOf(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [left, right] = [from, placeOf(event)].sort((a, b) => a - b);
    from = chart.selection = null;
    if (chart.frame.toX(right) - chart.frame.toX(left) > 8) board.zoomTo([left, right]);
    else board.point(board.place);
  });
  const leave = (event) => {
    from = chart.selection = null;
    // A finger that is lifted leaves the crosshair where it was; the next tap elsewhere takes it.
    if (event.pointerType === "touch") return;
    if (document.activeElement !== plot) board.point(null);
    else chart.tip.hidden = true;
  };
  plot.addEventListener("pointercancel", leave);
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", () => board.point(null));
  plot.addEventListener("dblclick", () => board.zoomTo(null));
  plot.addEventListener("keydown", (event) => {
    if (!chart.frame || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!pressed(chart, event)) return;
    event.preventDefault();
    event.stopPropagation();
  });
}

/** Keys on a chart: arrows move the crosshair, + and - zoom, 0 or Escape goes back. */
function pressed(chart, event) {
  const { board, frame } = chart, [low, high] = frame.domain;
  const longest = chart.series.reduce((best, one) => one.x.length > best.length ? one.x : best, []);
  const here = board.place ?? low;
  const go = (place) => {
    board.point(chart.snapped(Math.min(Math.max(place, low), high)), chart, null);
    chart.say();
    return true;
  };
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 };
  if (event.key in moves) {
    if (!longest.length) return true;
    const by = moves[event.key] * (event.shiftKey ? 10 : 1);
    const first = board.place === null ? (by > 0 ? -1 : longest.length) : nearestIndex(longest, here);
    return go(longest[Math.min(Math.max(first + by, 0), longest.length - 1)]);
  }
  if (event.key === "Home") return go(low);
  if (event.key === "End") return go(high);
  if (event.key === "+" || event.key === "=" || event.key === "-") {
    const middle = board.place ?? (low + high) / 2, factor = event.key === "-" ? 2 : 0.5;
    board.zoomTo([middle - (middle - low) * factor, middle + (high - middle) * factor]);
    return true;
  }
  if (event.key === "0" || (event.key === "Escape" && board.zoom)) {
    board.zoomTo(null);
    return true;
  }
  return false;
}
