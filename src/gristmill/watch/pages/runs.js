// The runs that the server knows: which are shown, in which order and colour.

import { seriesColour } from "./charts.js";

/** More runs than this are not shown unless somebody asks for them. */
export const MOST_SHOWN = 100;

// One collator for all: making one for each comparison takes longer than all the rest.
const names = new Intl.Collator("en", { numeric: true });

export const SORTS = {
  updated: ["Newest first", (a, b) => (b.updated ?? 0) - (a.updated ?? 0)],
  name: ["Name", (a, b) => names.compare(a.name, b.name)],
  state: ["State", (a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state)],
  loss: ["Loss", ascending("loss")],
  validation: ["Best validation", ascending("validation")],
  step: ["Steps", descending("step")],
  speed: ["Speed", descending("tokens_per_second")],
  eta: ["Time left", ascending("eta")],
  goodput: ["Goodput", ascending("goodput")],
};
const STATES = ["running", "silent", "failed", "stopped", "done", "unknown"];
function ascending(field) {
  return (a, b) => (a[field] ?? Infinity) - (b[field] ?? Infinity) || 0;
}
function descending(field) {
  return (a, b) => (b[field] ?? -Infinity) - (a[field] ?? -Infinity) || 0;
}

export class Runs {
  constructor(view) {
    this.view = view;
    this.rows = new Map();
    this.control = false;
    this.places = [];
    this.known = false;
    this.slots = new Map();
    /** The runs that are shown as long as nobody chooses: newer ones join while there is room. */
    this.usual = [];
    /** Settings for the search, by id: null until they are asked for. */
    this.settings = null;
  }

  /** All rows, as asked for. */
  replace({ runs, control, places }) {
    this.control = Boolean(control);
    this.places = places ?? [];
    this.rows = new Map(runs.map((row) => [row.id, row]));
    this.known = true;
    this.choose();
  }

  /** What an event says: changed fields of rows, and rows that are gone. */
  merge({ rows = [], gone = [] }) {
    const now = new Map(this.rows);
    for (const row of rows) now.set(row.id, { ...blank(row.id), ...now.get(row.id), ...row });
    for (const id of gone) now.delete(id);
    this.rows = now;
    this.choose();
  }

  choose() {
    const kept = this.usual.filter((id) => this.rows.has(id)), known = new Set(kept);
    const missing = [...this.rows.values()].filter(({ id }) => !known.has(id))
      .sort(SORTS.updated[1]).slice(0, MOST_SHOWN - kept.length);
    this.usual = [...kept, ...missing.map(({ id }) => id)];
  }

  /** The runs in charts, in the order of their names. */
  shown() {
    const { runs, hide } = this.view;
    const key = [this.rows, this.usual, runs, hide];
    if (this.shownFor?.every((one, index) => one === key[index])) return this.shownRows;
    const ids = (runs ?? this.usual).filter((id) => this.rows.has(id) && !hide.includes(id));
    const rows = ids.map((id) => this.rows.get(id)).sort(SORTS.name[1]);
    for (const { id } of rows) this.slotOf(id);
    [this.shownFor, this.shownRows] = [key, rows];
    return rows;
  }

  isShown(id) {
    const { runs, hide } = this.view;
    return (runs ?? this.usual).includes(id) && !hide.includes(id);
  }

  slotOf(id) {
    if (!this.slots.has(id)) {
      const taken = new Set();
      for (const [one, slot] of this.slots) if (this.rows.has(one)) taken.add(slot);
      let slot = 0;
      while (taken.has(slot)) slot += 1;
      this.slots.set(id, slot);
    }
    return this.slots.get(id);
  }

  colourOf(id) {
    return this.view.colours[id] ?? seriesColour(this.slotOf(id));
  }

  /** The list as it is searched and sorted, what is pinned first. */
  listed() {
    const { search, sort, pin } = this.view;
    const matches = matcher(search, this.settings);
    const [, compare] = SORTS[sort] ?? SORTS.updated;
    const pinned = (row) => pin.includes(row.id) ? 0 : 1;
    return [...this.rows.values()].filter(matches)
      .sort((a, b) => pinned(a) - pinned(b) || compare(a, b) || SORTS.name[1](a, b));
  }

  toggle(id) {
    const { runs, hide } = this.view;
    if (this.isShown(id)) {
      if (runs) this.view.set({ runs: runs.filter((one) => one !== id) });
      else this.view.set({ hide: [...hide, id] });
    } else if (hide.includes(id)) this.view.set({ hide: hide.filter((one) => one !== id) });
    else this.view.set({ runs: [...(runs ?? this.usual), id] });
  }

  showOnly(ids) {
    this.view.set({ runs: ids, hide: [] });
  }
}

const blank = (id) => ({ id, name: id, folder: "", state: "unknown", names: [], read: 1, revision: 0 });

/** Words that must all be in a row: in its name, folder or state, or `setting=value`. */
function matcher(search, settings) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return (row) => words.every((word) => {
    const [name, value] = word.split("=");
    if (value !== undefined && name) {
      const own = settings?.get(row.id) ?? [];
      return own.some(([setting, is]) => (setting === name || setting.endsWith(`.${name}`))
        && (is ?? "").toLowerCase().replaceAll('"', "").includes(value));
    }
    return `${row.name} ${row.folder} ${row.state}`.toLowerCase().includes(word);
  });
}
