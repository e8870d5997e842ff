// The controls above the charts and above the list, in line with the view.

import { byId, settled } from "./dom.js";
import { choice, element } from "./elements.js";
import { AXES } from "./numbers.js";
import { SORTS } from "./runs.js";

/** Make the controls; `update()` brings them in line with the view. */
export function prepareControls({ view, runs, settings, panels }) {
  const axes = Object.entries(AXES).map(([axis, { label }]) => [axis, label]);
  const across = choice("Across", axes, view.x, (x) => view.set({ x, zoom: null }));
  const logX = element("button", { type: "button", class: "small", "aria-pressed": "false",
    title: "Logarithmic x axis", onclick: () => view.set({ logx: !view.logx, zoom: null }) }, "log x");
  const output = element("output", { for: "smooth" });
  const slider = element("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01,
    oninput: (event) => view.set({ smooth: +event.target.value }) });
  const filter = element("input", { type: "search", id: "filter", autocomplete: "off",
    spellcheck: "false", placeholder: "Charts: loss|grad",
    oninput: settled(() => view.set({ filter: filter.value }), 150) });
  const reset = element("button", { type: "button", class: "small",
    onclick: () => panels.board.zoomTo(null) }, "Reset zoom");
  byId("controls").replaceChildren(
    element("div", { class: "group" }, across.node, logX),
    element("div", { class: "group" }, element("label", { for: "smooth" }, "Smoothing"), slider, output),
    element("div", { class: "group" }, element("label", { for: "filter", class: "unseen" },
      "Show only charts whose name matches, a regular expression"), filter),
    reset);
  const sort = byId("sort"), group = byId("group"), search = byId("search");
  sort.replaceChildren(...Object.entries(SORTS).map(([value, [text]]) =>
    element("option", { value }, text)));
  sort.onchange = () => view.set({ sort: sort.value });
  group.onchange = () => view.set({ group: group.value });
  // The settings are asked for when somebody wants to choose.
  for (const kind of ["focus", "pointerdown"]) {
    group.addEventListener(kind, () => { if (settings.want()) update(); });
  }
  search.oninput = settled(() => view.set({ search: search.value }), 120);

  function update() {
    across.press(view.x);
    logX.setAttribute("aria-pressed", String(view.logx));
    output.textContent = view.smooth.toFixed(2);
    if (document.activeElement !== slider) slider.value = view.smooth;
    if (document.activeElement !== filter) filter.value = view.filter;
    if (document.activeElement !== search) search.value = view.search;
    sort.value = view.sort;
    reset.hidden = !view.zoom;
    if (view.group) settings.want();
    const options = groupOptions(settings.differing(), view.group);
    const state = JSON.stringify(options);
    if (group.state !== state) {
      group.state = state;
      group.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    }
    group.value = view.group;
    group.title = runs.shown().length > 1 ? "" : "Groups need several runs";
  }
  update();
  return { update };
}

function groupOptions(differing, chosen) {
  const options = [["", "Each run"]];
  for (const { setting } of differing) options.push([`by:${setting}`, `By ${setting}`]);
  for (const { setting } of differing) options.push([`over:${setting}`, `Mean over ${setting}`]);
  if (chosen && !options.some(([value]) => value === chosen)) {
    const [how, ...name] = chosen.split(":");
    options.push([chosen, `${how === "by" ? "By" : "Mean over"} ${name.join(":")}`]);
  }
  return options;
}
