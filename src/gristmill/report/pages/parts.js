// How far the parts of a preparation are: one page that holds its own data, and is written again
// while the parts run.

import { element, numberCell, numberHead, tableCard } from "./elements.js";
import { followTheme } from "./page_theme.js";
import { byteSize, count, missing, percent, span, wholeNumber } from "./numbers.js";

const data = JSON.parse(document.getElementById("data").textContent);
const STATES = ["done", "signed", "running", "interrupted", "failed", "missing"];
const MEANINGS = { signed: "signed, waits to be grouped with all others", interrupted: "interrupted, goes on when it is started again", missing: "not begun" };
const sum = (name) => data.parts.reduce((total, part) => total + part[name], 0);
const amount = (state) => data.parts.filter((part) => part.state === state).length;

function tiles() {
  const { progress } = data;
  const rate = progress && progress.seconds > 0 ? progress.new_text_bytes / progress.seconds : null;
  const rows = [
    ["Parts", `${wholeNumber(amount("done"))} of ${wholeNumber(data.parts.length)}`, "are done"],
    ["Documents", count(sum("documents")), "were saved"],
    ["Tokens", count(sum("tokens")), "were saved"],
    ["Text", byteSize(sum("text_bytes")), missing(rate) ? "was saved" : `${byteSize(rate)} of it per second`],
  ];
  if (progress && progress.bytes_total) {
    rows.push(["Read", percent(progress.bytes_done / progress.bytes_total),
      `of ${byteSize(progress.bytes_total)} on disk`]);
  }
  if (progress && !data.complete && !missing(progress.seconds_left)) {
    rows.push(["Left", span(progress.seconds_left), `after ${span(progress.seconds)}`]);
  }
  return element("div", { class: "tiles" }, rows.map(([name, value, note]) =>
    element("div", { class: "card tile" }, element("span", {}, name),
      element("strong", {}, value), element("span", {}, note))));
}

function squares() {
  const shown = STATES.filter(amount);
  const words = shown.map((state) => `${amount(state)} ${state}`).join(", ");
  return [element("h2", {}, "Parts"),
    element("ul", { class: "states" }, shown.map((state) => element("li", {},
      element("i", { class: state, "aria-hidden": "true" }),
      `${wholeNumber(amount(state))} ${MEANINGS[state] ?? state}`))),
    element("div", { class: "card parts", role: "img", "aria-label": words },
      data.parts.map((part) => element("i", { class: part.state,
        title: `part ${part.part}: ${part.state}, ${count(part.documents)} documents` })))];
}

function unfinished() {
  const order = ["failed", "interrupted", "running"];
  const rows = data.parts.filter((part) => order.includes(part.state))
    .sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || a.part - b.part)
    .slice(0, 200).map((part) => [
      element("th", { scope: "row", class: "number" }, wholeNumber(part.part)), part.state,
      numberCell(count(part.documents)), numberCell(count(part.tokens)),
      part.what ?? "", element("td", { class: "path" }, part.log ?? "")]);
  if (!rows.length) return [];
  return [element("h2", {}, "Not done yet"), tableCard([numberHead("Part"), "State",
    numberHead("Documents"), numberHead("Tokens"), "By whom, or why", "Log"], rows, "Not done yet")];
}

function events() {
  if (!data.events.length) return [];
  const rows = data.events.map(([at, what]) =>
    [element("th", { scope: "row", class: "events" }, at), what]);
  return [element("h2", {}, "What happened"), tableCard(["At", "What"], rows, "What happened")];
}

function footer() {
  const again = data.again ? `, and again every ${span(data.again)} while the parts run` : "";
  return element("footer", {},
    `Written with Gristmill on ${data.made.slice(0, 19).replace("T", " ")}${again}.`);
}

const state = data.complete ? "Complete: all parts are merged." : data.doing;
document.getElementById("page").replaceChildren(...[element("h1", {}, data.name),
  element("p", { class: "note" }, state), tiles(), squares(), unfinished(), events(), footer()].flat());
followTheme();
if (data.again) setTimeout(() => location.reload(), 1000 * data.again);
