// Where the time of runs went: one stacked bar and a table, and the share that trained.

import { dot, element, numberCell, numberHead, tableCard } from "./elements.js";
import { fixed, missing, percent, span } from "./numbers.js";

/** What the parts of the wall time are called, and their colours: what trains first. */
const PARTS_OF_TIME = {
  compute: ["Forward and backward", "--c2"],
  optimizer: ["Optimizer", "--c5"],
  communication: ["Waiting for other processes", "--c3"],
  data: ["Waiting for data", "--c4"],
  compile: ["Compiling", "--c0"],
  validation: ["Validation", "--t0"],
  evaluation: ["Evaluation", "--t1"],
  samples: ["Samples", "--t2"],
  save: ["Saving checkpoints", "--c6"],
  check: ["Checks", "--t3"],
  start: ["Start", "--c7"],
  restart: ["Starts after an interruption", "--t4"],
  lost: ["Steps lost to interruptions", "--c1"],
  down: ["Down", "--t5"],
  queue: ["In the queue", "--t6"],
};

const partName = (name) => PARTS_OF_TIME[name]?.[0] ?? name.replaceAll("_", " ");
const partColour = (name) => PARTS_OF_TIME[name]?.[1] ?? "--muted";

/** The parts that took any time, in the order of the table above. */
function partsOf(time) {
  const order = Object.keys(PARTS_OF_TIME);
  const place = (name) => order.includes(name) ? order.indexOf(name) : order.length;
  return Object.entries(time.parts).filter(([, seconds]) => seconds > 0)
    .sort(([a], [b]) => place(a) - place(b));
}

function swatch(part) {
  const node = element("i", { class: "swatch", "aria-hidden": "true" });
  node.style.background = `var(${partColour(part)})`;
  return node;
}

/** Runs below each other, with the share of each part: `entries` are [label, time]. */
export function timeTable(entries) {
  const order = [...Object.keys(PARTS_OF_TIME), ...entries.flatMap(([, time]) => Object.keys(time.parts))];
  const names = [...new Set(order)].filter((name) => entries.some(([, time]) => time.parts[name] > 0));
  const rows = entries.map(([label, time]) => [element("th", { scope: "row" }, label),
    numberCell(span(time.wall)), numberCell(percent(time.goodput)),
    ...names.map((name) => numberCell(percent((time.parts[name] ?? 0) / (time.wall || 1))))]);
  const heads = names.map((name) => element("th", { class: "number", scope: "col" }, swatch(name),
    partName(name)));
  return tableCard(["Run", numberHead("Wall time"), numberHead("Goodput"), ...heads], rows,
    "Where the time went");
}

/** `time` is { wall, parts: { name: seconds }, goodput, kwh, attempts }; `table` tells whether the
 * bar has a table below it. */
export function timeFigure(time, { name = null, colour = null, table = true } = {}) {
  const parts = partsOf(time);
  const total = time.wall || 1;
  const spent = element("div", { class: "spent", role: "img", "aria-label": accountWords(time) },
    parts.map(([part, seconds]) => {
      const text = `${partName(part)}: ${span(seconds)}, ${percent(seconds / total)}`;
      const piece = element("i", { title: text });
      piece.style.flexGrow = seconds / total;
      piece.style.background = `var(${partColour(part)})`;
      return piece;
    }));
  const facts = [
    missing(time.goodput) ? null : element("span",
      { title: "Share of the wall time that trained steps which were kept" }, "goodput ",
      element("b", {}, percent(time.goodput))),
    element("span", {}, `${span(time.wall)} in all`),
    time.attempts > 1 ? element("span", {}, `${time.attempts} starts`) : null,
    missing(time.kwh) ? null : element("span", {}, energy(time.kwh)),
  ];
  const rows = [...parts].sort((a, b) => b[1] - a[1]).map(([part, seconds]) => {
    return [element("th", { scope: "row" }, swatch(part), partName(part)), numberCell(span(seconds)),
      numberCell(percent(seconds / total))];
  });
  const below = tableCard(["Part", numberHead("Time"), numberHead("Share")], rows,
    "Where the time went");
  below.classList.remove("card");
  const title = name === null ? null : element("h3", { class: "run" }, colour ? dot(colour) : null, name);
  return element("figure", { class: "card account" },
    element("figcaption", {}, title, facts), spent, table ? below : null);
}

const energy = (kwh) => kwh < 0.1 ? `${fixed(1)(kwh * 1000)} Wh` : `${fixed(2)(kwh)} kWh`;

function accountWords(time) {
  const parts = partsOf(time).map(([part, seconds]) =>
    `${partName(part)} ${percent(seconds / (time.wall || 1))}`);
  return `Where the time went: ${parts.join(", ")}`;
}

/** Processes that were slower than the others: [{ step, rank, host, phase, ratio, seconds, … }]. */
export function stragglerTable(found, names = null) {
  const rows = found.map((one) => [
    ...(names ? [names(one.run)] : []),
    element("td", { class: "moment" }, `step ${one.step.toLocaleString("en")}`),
    numberCell(String(one.rank)), one.host ?? "–", one.phase ?? "–",
    numberCell(missing(one.ratio) ? "–" : `${((one.ratio - 1) * 100).toFixed(0)}%`),
    numberCell(missing(one.seconds) ? "–" : span(one.seconds)), one.cause ?? "–",
    one.over ? "as fast as the others again" : "slow",
  ]);
  const head = [...(names ? ["Run"] : []), "Since", numberHead("Rank"), "Host", "Phase",
    numberHead("Slower by"), numberHead("Per step"), "Cause", "State"];
  return tableCard(head, rows, "Slow processes");
}
