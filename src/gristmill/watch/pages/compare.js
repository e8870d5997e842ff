// The shown runs beside each other: what differs between their settings, and where their time went.

import { timeFigure, timeTable } from "./account.js";
import { getJson } from "./api.js";
import { cssColour } from "./charts.js";
import { byId } from "./dom.js";
import { dot, element, numberHead, tableCard } from "./elements.js";
import { count, fixed, missing, percent, span, wholeNumber } from "./numbers.js";

/** Runs whose account of time is asked for; more bars than this nobody reads. */
const MOST_ACCOUNTS = 12;
const collator = new Intl.Collator("en", { numeric: true });
/** These differ by nature. */
const OWN = new Set(["name", "folder"]);

/** What differs between the settings of the shown runs; asked for when the runs change. */
export class Settings {
  constructor({ runs, onchange, onfailure }) {
    Object.assign(this, { runs, onchange, onfailure });
    this.ids = "";
    this.found = null;
  }

  /** The answer for the shown runs; null until it is there. */
  want() {
    const ids = this.runs.shown().map(({ id }) => id).join(",");
    if (ids === this.ids) return this.found;
    this.ids = ids;
    this.found = null;
    if (!ids) return null;
    getJson(`api/settings?runs=${ids}`).then((found) => {
      if (ids !== this.ids) return;
      this.found = found;
      this.onchange();
    }, (error) => {
      this.ids = "";
      this.onfailure(error);
    });
    return null;
  }

  differing() {
    return (this.found?.settings ?? []).filter(({ setting }) => !OWN.has(setting));
  }
}

/** The runs that are one line, for `by:setting` (equal value) or `over:setting` (all else equal):
 * [{ label, ids, index }]; null if nothing is grouped or the settings are not known yet. */
export function groupsOf(group, runs, settings) {
  const [how, ...rest] = group.split(":"), name = rest.join(":");
  if (!name || !settings.found) return null;
  const differing = settings.differing(), { runs: ids } = settings.found;
  const shown = new Set(runs.shown().map(({ id }) => id));
  const groups = new Map();
  ids.forEach((id, place) => {
    if (!shown.has(id)) return;
    const told = differing.filter(({ setting }) => how === "by" ? setting === name : setting !== name);
    const label = told.map(({ setting, values }) => `${setting} = ${values[place] ?? "–"}`).join(", ")
      || "all runs";
    if (!groups.has(label)) groups.set(label, []);
    groups.get(label).push(id);
  });
  return [...groups].sort(([a], [b]) => collator.compare(a, b))
    .map(([label, members], index) => ({ label, ids: members, index }));
}

export class Compare {
  constructor({ runs, view, about, settings }) {
    Object.assign(this, { runs, view, about, settings });
    this.place = byId("compare");
    this.state = "";
  }

  update() {
    if (this.view.tab !== "compare") return;
    const rows = this.runs.shown();
    const found = this.settings.want();
    const first = rows.slice(0, MOST_ACCOUNTS);
    for (const row of first) this.about.want(row);
    const times = first.map((row) => this.about.get(row.id)?.time ?? null);
    const state = JSON.stringify([rows.map((row) => ({ ...row, names: 0 })), found, times,
      rows.map(({ id }) => this.runs.colourOf(id))]);
    if (state === this.state) return;
    this.state = state;
    const { scrollLeft } = this.place.querySelector(".scroll") ?? {};
    this.place.replaceChildren(...(rows.length ? this.parts(rows, times)
      : [element("p", { class: "empty" }, "No run is shown: tick some in the list.")]));
    if (scrollLeft) this.place.querySelector(".scroll").scrollLeft = scrollLeft;
  }

  parts(rows, times) {
    const known = rows.map((row, index) => [row, times[index]]).filter(([, time]) => time);
    const bars = known.map(([row, time]) =>
      timeFigure(time, { name: row.name, colour: cssColour(this.runs.colourOf(row.id)), table: false }));
    const table = timeTable(known.map(([row, time]) => [this.named(row), time]));
    const more = rows.length > MOST_ACCOUNTS
      ? element("p", { class: "note" }, `Of the first ${MOST_ACCOUNTS} of ${rows.length} shown runs.`) : null;
    return [element("h2", {}, "Results"), this.results(rows),
      element("h2", {}, "Settings that differ"), this.differences(rows),
      ...(bars.length ? [element("h2", {}, "Where the time went"), more, ...bars, table] : [])].filter(Boolean);
  }

  named(row) {
    return element("span", { class: "run" }, dot(cssColour(this.runs.colourOf(row.id))), row.name);
  }

  results(rows) {
    const columns = [
      ["Loss", "loss", fixed(4), Math.min], ["Best validation", "validation", fixed(4), Math.min],
      ["Steps", "step", wholeNumber], ["Tokens", "tokens", count],
      ["Tokens/s", "tokens_per_second", count, Math.max], ["MFU", "mfu", percent, Math.max],
      ["Goodput", "goodput", percent, Math.max], ["Time", "seconds", span], ["Time left", "eta", span],
    ].filter(([, field]) => rows.some((row) => !missing(row[field])));
    const best = columns.map(([, field, show, choose]) => {
      const values = rows.map((row) => row[field]).filter((value) => !missing(value));
      return choose && new Set(values.map(show)).size > 1 ? show(choose(...values)) : null;
    });
    const lines = rows.map((row) => [element("th", { scope: "row" }, this.named(row)),
      element("td", { class: row.state }, row.state), ...columns.map(([, field, show], index) => {
        const text = show(row[field]);
        return element("td", { class: `number${text === best[index] ? " best" : ""}` }, text);
      })]);
    return tableCard(["Run", "State", ...columns.map(([name]) => numberHead(name))], lines, "Results");
  }

  differences(rows) {
    const { found } = this.settings;
    if (!found) return element("p", { class: "note" }, "Reading …");
    const differing = this.settings.differing();
    if (!differing.length) {
      const text = rows.length > 1 ? "The settings of these runs are the same."
        : "One run is shown: tick another to see what differs.";
      return element("p", { class: "note" }, text);
    }
    const place = new Map(found.runs.map((id, index) => [id, index]));
    // Settings are columns: there are often many runs, and few settings that differ.
    const lines = rows.filter(({ id }) => place.has(id)).map((row) => [
      element("th", { scope: "row" }, this.named(row)),
      ...differing.map(({ values }) => element("td", { class: "mono" }, values[place.get(row.id)] ?? "–"))]);
    const heads = differing.map(({ setting }) =>
      element("th", { scope: "col", class: "mono" }, setting));
    return tableCard(["Run", ...heads], lines, "Settings that differ");
  }
}
