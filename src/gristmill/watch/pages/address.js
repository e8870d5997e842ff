// The view in the address: what is shown, so that a link shows the same and the back key works.

/** What the address leaves out. Lists are of ids or names. */
const DEFAULTS = {
  tab: "charts", part: "overview", open: "", x: "step", logx: false, smooth: 0.6, zoom: null,
  runs: null, hide: [], pin: [], colours: {}, group: "", search: "", sort: "updated", filter: "",
  log: [], shut: ["System", "Other"],
};
const LISTS = ["hide", "pin", "log", "shut"];
/** Changes of these are steps that the back key undoes; others replace the address. */
const STEPS = new Set(["tab", "part", "open", "x", "zoom", "runs", "hide", "group"]);

const copyOf = (value) => structuredClone(value);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** The view that an address describes; what it does not understand is left at its default. */
export function parseAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const view = copyOf(DEFAULTS);
  for (const name of ["part", "open", "group", "search", "sort", "filter"]) {
    view[name] = given.get(name) ?? view[name];
  }
  if (["charts", "run", "compare"].includes(given.get("tab"))) view.tab = given.get("tab");
  if (["tokens", "seconds", "flops"].includes(given.get("x"))) view.x = given.get("x");
  view.logx = given.get("logx") === "1";
  const smooth = Number(given.get("smooth") ?? NaN);
  if (smooth >= 0 && smooth <= 0.99) view.smooth = smooth;
  const [from, to] = ["from", "to"].map((name) => Number(given.get(name) ?? NaN));
  if (from < to) view.zoom = [from, to];
  if (given.has("runs")) view.runs = given.get("runs").split(",").filter(Boolean);
  for (const name of LISTS) {
    if (given.has(name)) view[name] = given.get(name).split(",").filter(Boolean);
  }
  for (const pair of (given.get("colours") ?? "").split(",")) {
    const [id, colour] = pair.split(":");
    if (/^[0-9a-f]{6}$/.test(colour ?? "")) view.colours[id] = `#${colour}`;
  }
  return view;
}

/** The address of a view. */
export function addressOf(view) {
  const told = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (same(value, DEFAULTS[name])) continue;
    if (name === "zoom") {
      told.set("from", value[0]);
      told.set("to", value[1]);
    } else if (name === "colours") {
      told.set(name, Object.entries(value).map(([id, one]) => `${id}:${one.slice(1)}`).join(","));
    } else if (Array.isArray(value)) told.set(name, value.join(","));
    else told.set(name, value === true ? "1" : String(value));
  }
  // Commas and colons may stand in a fragment as they are, and read better.
  return `#${told.toString().replaceAll("%2C", ",").replaceAll("%3A", ":")}`;
}

/** The view and who follows it: `onchange(names)` with the names of what has changed. */
export class View {
  constructor(onchange) {
    Object.assign(this, parseAddress(location.hash));
    this.onchange = onchange;
    addEventListener("popstate", () => this.take(parseAddress(location.hash)));
  }

  plain() {
    return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this[name]]));
  }

  take(found) {
    const changed = Object.keys(DEFAULTS).filter((name) => !same(found[name], this[name]));
    Object.assign(this, found);
    if (changed.length) this.onchange(new Set(changed));
  }

  set(changes) {
    const changed = Object.keys(changes).filter((name) => !same(changes[name], this[name]));
    if (!changed.length) return;
    Object.assign(this, copyOf(changes));
    const address = addressOf(this.plain());
    const step = changed.some((name) => STEPS.has(name));
    // Browsers refuse too many changes in a short time; the view is right all the same.
    try {
      history[step ? "pushState" : "replaceState"](null, "", address);
    } catch {
      // The next change brings the address in line.
    }
    this.onchange(new Set(changed));
  }
}
