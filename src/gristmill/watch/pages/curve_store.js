// The curves that the page holds, and asking for what is missing or has grown.
//
// Only what a visible chart shows is asked for, some runs at a time, so that the page paints what
// it has. An answer leaves out what has not changed, and of a curve that has grown it has the end.

import { getCurves, stopped } from "./api.js";

const RUNS_AT_A_TIME = 25;
const NAMES_AT_A_TIME = 16;
const POINTS = 600;
/** Milliseconds between two looks at a stretch that is zoomed into while its runs go on. */
const ZOOM_PAUSE = 3000;

export class CurveStore {
  /** `wanted()`: { runs: [row], names: [name], axis, zoom }; `onchange(runs, names)` after an answer;
   * `onfailure(error)`, after which nothing is asked until `pump` is called. */
  constructor({ view, wanted, onchange, onfailure }) {
    Object.assign(this, { view, wanted, onchange, onfailure });
    this.curves = new Map();
    /** The keys of what was asked for since it changed last. */
    this.fresh = new Set();
    this.zoomed = new Map();
    this.zoomName = "";
    this.busy = null;
    this.again = false;
    this.zoomTimer = 0;
  }

  /** The best there is of a curve for what is looked at. */
  get(run, name) {
    const key = `${this.view.x}|${run}|${name}`;
    return this.zoomed.get(key) ?? this.curves.get(key);
  }

  /** Runs have new records. */
  changed(runs) {
    const these = new Set(runs);
    for (const key of this.fresh) if (these.has(key.split("|")[1])) this.fresh.delete(key);
    if (this.zoomed.size && !this.zoomTimer) {
      this.zoomTimer = setTimeout(() => { this.zoomTimer = 0; this.pump(); }, ZOOM_PAUSE);
    }
    this.pump();
  }

  forget(runs) {
    const gone = new Set(runs);
    for (const map of [this.curves, this.fresh, this.zoomed]) {
      for (const key of map.keys()) if (gone.has(key.split("|")[1])) map.delete(key);
    }
  }

  /** Ask for what is missing, unless that is going on. */
  pump() {
    if (this.busy) {
      this.again = true;
      return;
    }
    if (document.hidden) return;
    const request = this.next();
    if (!request) return;
    this.busy = new AbortController();
    this.ask(request, this.busy.signal).then(() => {
      this.busy = null;
      this.again = false;
      this.pump();
    }, (error) => {
      this.busy = null;
      if (stopped(error)) this.pump();
      else this.onfailure(error);
    });
  }

  /** Something else is looked at: what is on its way is of no use. */
  restart() {
    if (this.busy) this.busy.abort();
    else this.pump();
  }

  /** The next request, or null if all is there. */
  next() {
    const { runs, names, axis, zoom } = this.wanted();
    const zoomName = zoom ? `${axis}|${zoom.join("|")}` : "";
    if (zoomName !== this.zoomName) {
      this.zoomName = zoomName;
      this.zoomed.clear();
      clearTimeout(this.zoomTimer);
      this.zoomTimer = 0;
      for (const key of this.fresh) if (key.endsWith("|zoom")) this.fresh.delete(key);
    }
    for (const stretch of zoom ? [zoom, null] : [null]) {
      const end = stretch ? "|zoom" : "";
      const lacks = ({ id, names: own }) => names.some((name) =>
        own.includes(name) && !this.fresh.has(`${axis}|${id}|${name}${end}`));
      const lacking = runs.filter(lacks).slice(0, RUNS_AT_A_TIME);
      if (!lacking.length) continue;
      if (stretch && this.zoomTimer) continue;
      const needed = names.filter((name) => lacking.some(({ id, names: own }) =>
        own.includes(name) && !this.fresh.has(`${axis}|${id}|${name}${end}`)));
      return { runs: lacking.map(({ id }) => id), names: needed.slice(0, NAMES_AT_A_TIME), axis,
        zoom: stretch };
    }
    return null;
  }

  async ask({ runs, names, axis, zoom }, signal) {
    const place = zoom ? this.zoomed : this.curves;
    const since = runs.flatMap((run) => names.flatMap((name) => {
      const curve = place.get(`${axis}|${run}|${name}`);
      return curve && curve.generation !== null
        ? [[run, name, curve.generation, curve.x.length, curve.revision]] : [];
    }));
    const body = { runs, names, x: axis, points: POINTS, since };
    if (zoom) Object.assign(body, { from: zoom[0], to: zoom[1] });
    // What changes while the answer is on its way must be asked for again.
    const keys = runs.flatMap((run) => names.map((name) =>
      `${axis}|${run}|${name}${zoom ? "|zoom" : ""}`));
    for (const key of keys) this.fresh.add(key);
    let found;
    try {
      found = await getCurves("api/curves", { body, signal });
    } catch (error) {
      for (const key of keys) this.fresh.delete(key);
      throw error;
    }
    for (const curve of found) {
      const key = `${axis}|${curve.run}|${curve.name}`;
      // What a run took back altogether comes as no points.
      if (curve.x.length) place.set(key, joined(place.get(key), curve));
      else place.delete(key);
    }
    this.onchange(new Set(runs), new Set(names));
  }

  /** Another server may answer now: what is held is shown until its answer is there, but nothing
   * is built upon it. */
  distrust() {
    for (const map of [this.curves, this.zoomed]) {
      for (const curve of map.values()) curve.generation = null;
    }
    this.fresh.clear();
  }
}

/** A curve with its new end: points from index `first` on replace those that were held. */
function joined(held, curve) {
  if (!held || curve.first === 0 || curve.first > held.x.length) return curve;
  const join = (Kind, before, after) => {
    const list = new Kind(curve.first + after.length);
    list.set(before.subarray(0, curve.first));
    list.set(after, curve.first);
    return list;
  };
  const band = Boolean(held.low && curve.low);
  return {
    ...curve, x: join(Float64Array, held.x, curve.x), mean: join(Float32Array, held.mean, curve.mean),
    low: band ? join(Float32Array, held.low, curve.low) : null,
    high: band ? join(Float32Array, held.high, curve.high) : null,
  };
}
