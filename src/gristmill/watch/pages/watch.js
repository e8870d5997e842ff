// The live page: what happens when. The parts it joins do not know each other.

import { View } from "./address.js";
import { getJson, takeToken } from "./api.js";
import { prepareColours } from "./colours.js";
import { Compare, groupsOf, Settings } from "./compare.js";
import { Connection } from "./connection.js";
import { prepareControls } from "./controls.js";
import { CurveStore } from "./curve_store.js";
import { About, Details } from "./details.js";
import { byId, notice, settled, unnotice } from "./dom.js";
import { element } from "./elements.js";
import { List } from "./list.js";
import { Panels } from "./panels.js";
import { MOST_SHOWN, Runs } from "./runs.js";

takeToken();

const view = new View((names) => viewChanged(names));
const runs = new Runs(view);
const failed = (error) => connection.lost(error);
const about = new About({ onchange: () => aboutChanged(), onfailure: failed });
const settings = new Settings({ runs, onchange: () => settingsChanged(), onfailure: failed });
const store = new CurveStore({
  view,
  wanted: () => ({ runs: runs.shown(), names: view.tab === "charts" ? panels.wanted() : [],
    axis: view.x, zoom: view.zoom }),
  onchange: (ids, names) => panels.refresh(names),
  onfailure: failed,
});
const panels = new Panels({ runs, view, store, about: (id) => about.get(id),
  groups: () => view.group ? groupsOf(view.group, runs, settings) : null });
const list = new List(runs, view, { onopen: (id) => openRun(id), onraise: (id) => panels.board.raise(id) });
const details = new Details({ runs, view, about, onfailure: failed });
const compare = new Compare({ runs, view, about, settings });
const controls = prepareControls({ view, runs, settings, panels });
const connection = new Connection({ onbegin: () => readRuns(), ontold: (kind, data) => told(kind, data) });

/* ---- what comes from the server ---- */

/** All rows; returns their version. What is held may be of a server that is gone. */
async function readRuns() {
  const found = await getJson("api/runs");
  if (runs.known) store.distrust();
  runs.replace(found);
  rowsChanged();
  return found.version ?? 0;
}

function told(kind, data) {
  if (kind !== "runs") return;
  const gone = data.gone ?? [];
  if (data.all) {
    const here = new Set(data.rows.map(({ id }) => id));
    gone.push(...[...runs.rows.keys()].filter((id) => !here.has(id)));
  }
  const before = new Map([...runs.rows].map(([id, { revision }]) => [id, revision]));
  runs.merge({ rows: data.rows, gone });
  store.forget(gone);
  rowsChanged();
  store.changed([...runs.rows.values()].filter(({ id, revision }) => before.get(id) !== revision)
    .map(({ id }) => id));
}

/** What the charts are made of, as far as rows decide it. */
let arranged = "";

function rowsChanged() {
  list.update();
  welcome();
  const shown = runs.shown();
  const state = JSON.stringify(shown.map(({ id, names }) => [id, names.length]));
  if (state !== arranged) {
    arranged = state;
    panels.arrange();
    controls.update();
  }
  wantMarkers();
  details.update();
  compare.update();
  store.pump();
}

/** Marks of events are shown for the open run, and for all if they are few. */
function wantMarkers() {
  if (view.tab !== "charts" || view.group) return;
  const shown = runs.shown();
  for (const row of shown) if (shown.length <= 3 || row.id === view.open) about.want(row);
}

function aboutChanged() {
  wantMarkers();
  panels.refresh();
  details.update();
  compare.update();
}

function settingsChanged() {
  controls.update();
  panels.refresh();
  compare.update();
}

/* ---- what the view says ---- */

function viewChanged(names) {
  const any = (...wanted) => wanted.some((name) => names.has(name));
  if (any("tab", "open")) showTab();
  if (any("search")) searchSettings();
  if (any("tab", "open", "search", "sort", "pin", "hide", "runs", "colours")) list.update();
  if (any("x", "zoom", "runs", "hide")) store.restart();
  if (any("group", "runs", "hide") && view.group) settings.want();
  if (any("x", "logx", "zoom", "runs", "hide", "filter", "log", "shut", "smooth", "group", "colours",
    "open", "tab")) {
    panels.arrange();
  }
  controls.update();
  wantMarkers();
  details.update();
  compare.update();
  welcome();
  store.pump();
}

function showTab() {
  for (const tab of ["charts", "run", "compare"]) {
    const button = byId(`tab-${tab}`), chosen = tab === view.tab;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    byId(tab).hidden = !chosen;
  }
  const row = runs.rows.get(view.open);
  document.title = view.tab === "run" && row ? `${row.name} · Gristmill watch` : "Gristmill watch";
}

function openRun(id) {
  view.set({ open: id, tab: "run" });
  closeRuns();
}

const searchSettings = settled(async () => {
  if (!view.search.includes("=") || runs.settings) return;
  try {
    const all = [...runs.rows.keys()].join(",");
    const { runs: ids, settings: found } = await getJson(`api/settings?runs=${all}`);
    runs.settings = new Map(ids.map((id, index) =>
      [id, found.map(({ setting, values }) => [setting.toLowerCase(), values[index]])]));
    // Runs that start later have settings of their own.
    setTimeout(() => { runs.settings = null; }, 30_000);
    list.update();
  } catch (error) {
    failed(error);
  }
}, 200);

/* ---- nothing to show ---- */

function welcome() {
  const place = byId("welcome"), { tab } = view;
  if (!runs.known) return;
  const none = runs.rows.size === 0, unshown = !none && tab === "charts" && runs.shown().length === 0;
  const empty = !none && !unshown && tab === "charts" && runs.shown().every((row) => !row.names.length);
  place.hidden = !(none || unshown || empty);
  byId("charts").hidden = tab !== "charts" || !place.hidden;
  if (none) {
    const looked = runs.places.length ? element("ul", {}, runs.places.map((where) =>
      element("li", { class: "mono" }, where))) : null;
    place.replaceChildren(element("h2", {}, "No runs found"),
      element("p", {}, looked ? "Looked in:" : "There is no run in the folders that were given."),
      ...[looked].filter(Boolean), element("p", {}, "Start one, and it appears here:"),
      element("pre", { class: "card" }, "gristmill train run.toml"),
      element("p", {}, "Or name other folders:"),
      element("pre", { class: "card" }, "gristmill watch runs /shared/runs"));
  } else if (unshown) {
    place.replaceChildren(element("h2", {}, "No run is shown"),
      element("p", {}, "Tick runs in the list, or show the newest again."),
      element("button", { type: "button", class: "primary",
        onclick: () => view.set({ runs: null, hide: [] }) }, "Show the newest"));
  } else if (empty) {
    place.replaceChildren(element("h2", {}, "Nothing recorded yet"),
      element("p", {}, "The first step has not been recorded. Charts appear by themselves."));
  }
}

/* ---- controls around ---- */

function openRuns() {
  document.body.classList.add("with-runs");
  byId("open-runs").setAttribute("aria-expanded", "true");
  byId("main").inert = narrow.matches;
  byId("search").focus();
}
function closeRuns() {
  if (!document.body.classList.contains("with-runs")) return;
  document.body.classList.remove("with-runs");
  byId("open-runs").setAttribute("aria-expanded", "false");
  byId("main").inert = false;
  if (narrow.matches) byId("open-runs").focus();
}
const narrow = matchMedia("(max-width: 860px)");
byId("open-runs").onclick = () =>
  document.body.classList.contains("with-runs") ? closeRuns() : openRuns();
byId("close-runs").onclick = closeRuns;
byId("main").addEventListener("pointerdown", closeRuns);
const tabs = ["charts", "run", "compare"];
for (const [index, tab] of tabs.entries()) {
  const button = byId(`tab-${tab}`);
  button.onclick = () => view.set({ tab, ...(tab === "run" && !view.open ? { open: firstRun() } : {}) });
  button.onkeydown = ({ key }) => {
    const by = { ArrowLeft: tabs.length - 1, ArrowRight: 1 }[key];
    if (!by) return;
    const next = byId(`tab-${tabs[(index + by) % tabs.length]}`);
    next.click();
    next.focus();
  };
}
const firstRun = () => (runs.shown()[0] ?? [...runs.rows.values()][0])?.id ?? "";

byId("show-listed").onclick = () => {
  const ids = list.listed.slice(0, MOST_SHOWN).map(({ id }) => id);
  runs.showOnly(ids);
  unnotice("many");
  if (list.listed.length > MOST_SHOWN) {
    notice("many", `The first ${MOST_SHOWN} of ${list.listed.length} runs are shown.`);
  }
};
byId("show-none").onclick = () => runs.showOnly([]);
byId("show-usual").onclick = () => view.set({ runs: null, hide: [] });
byId("open-help").onclick = () => byId("help").showModal();
byId("skip").onclick = (event) => {
  event.preventDefault();
  byId("main").focus();
};
addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeRuns();
  const writing = event.target.closest?.("input:not([type=range],[type=checkbox]), select, textarea, dialog");
  if (event.key !== "/" || writing || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  if (narrow.matches) openRuns();
  byId("search").focus();
});
byId("search").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "Enter") return;
  event.preventDefault();
  list.focus();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) store.pump();
});
prepareColours(byId("theme"));
showTab();
if (view.search) searchSettings();
connection.start();
