// What a token set consists of: one page that holds its own data.

import { element, numberCell, numberHead, tableCard } from "./elements.js";
import { followTheme } from "./page_theme.js";
import {
  byteSize, count, missing, percent, percentish, significant, wholeNumber,
} from "./numbers.js";

const data = JSON.parse(document.getElementById("data").textContent);

/** A cell with a bar as long as a share of the row's table. */
function barCell(share, text) {
  const bar = element("i", { class: "share", "aria-hidden": "true" });
  bar.style.width = `${(100 * share).toFixed(1)}%`;
  return element("td", { class: "shares" }, bar, element("span", {}, text));
}

/** Rows of a name and an amount, each with its share of the whole as a bar. */
function shareTable(names, rows, whole, title) {
  const most = Math.max(...rows.map(([, amount]) => amount), 1);
  return tableCard([names, numberHead("Documents"), "Share"], rows.map(([name, amount]) => [
    element("th", { scope: "row" }, name), numberCell(wholeNumber(amount)),
    barCell(amount / most, percent(amount / (whole || 1)))]), title);
}

function header() {
  const perToken = data.text_bytes ? data.text_bytes / data.tokens : null;
  const rows = [
    ["Tokens", count(data.tokens), data.format],
    ["Documents", count(data.documents), `${significant(3)(data.lengths.mean)} tokens each, in the mean`],
    ["Text", missing(data.text_bytes) ? "–" : byteSize(data.text_bytes), "before it was cut into tokens"],
    ["Bytes per token", significant(3)(perToken), `vocabulary of ${wholeNumber(data.vocabulary)}`],
    ["Copies", percent(data.copies.documents / data.documents),
      `${wholeNumber(data.copies.documents)} documents are exact copies of others`],
    ["Sources", data.sources ? count(data.sources.count) : "–", "files that documents come from"],
  ].filter(([, value]) => value !== "–");
  return [
    element("h1", {}, data.name),
    element("div", { class: "tiles" }, rows.map(([name, value, note]) =>
      element("div", { class: "card tile" }, element("span", {}, name),
        element("strong", {}, value), element("span", {}, note)))),
  ];
}

function lengths() {
  const { classes, quantiles } = data.lengths;
  const most = Math.max(...classes.map((row) => row.documents));
  const rows = classes.map((row) => [
    element("th", { scope: "row" }, `${wholeNumber(row.from)} to ${wholeNumber(2 * row.from - 1)}`),
    numberCell(wholeNumber(row.documents)), numberCell(percent(row.tokens / data.tokens)),
    barCell(row.documents / most, percent(row.documents / data.documents)),
  ]);
  const words = quantiles.map(([share, value]) => `${percentish(share)}: ${wholeNumber(value)}`).join(", ");
  return [element("h2", {}, "Lengths"), element("p", { class: "note" },
    `Tokens of a document at quantiles: ${words}.`),
  tableCard(["Tokens", numberHead("Documents"), numberHead("Of all tokens"), "Of all documents"], rows,
    "Lengths of documents")];
}

function sources() {
  if (!data.sources) return [];
  const { rows, others, count: all } = data.sources;
  const most = Math.max(...rows.map((row) => row.tokens), 1);
  const cells = (name, row) => [element("th", { scope: "row", class: "path" }, name),
    numberCell(wholeNumber(row.documents)), numberCell(count(row.tokens)),
    barCell(Math.min(1, row.tokens / most), percent(row.tokens / data.tokens))];
  const shown = rows.map((row) => cells(row.name, row));
  if (all > rows.length) shown.push(cells(`${wholeNumber(all - rows.length)} others`, others));
  return [element("h2", {}, "Sources"), tableCard(
    ["Source", numberHead("Documents"), numberHead("Tokens"), "Of all tokens"], shown, "Sources")];
}

function languages() {
  return [element("h2", {}, "Languages"), element("p", { class: "note" },
    `Guessed for ${wholeNumber(data.sampled)} documents from their letters and commonest words.`),
  shareTable("Language", data.languages, data.sampled, "Languages")];
}

function phrases() {
  const names = { 1: "Words", 2: "Two words", 3: "Three words", 5: "Five words" };
  const cards = Object.entries(data.phrases).filter(([, rows]) => rows.length).map(([words, rows]) =>
    element("section", {}, element("h3", {}, names[words]), tableCard(
      ["Phrase", numberHead("Times"), numberHead("Documents")], rows.map(([phrase, times, documents]) =>
        [phrase, numberCell(wholeNumber(times)), numberCell(wholeNumber(documents))]), names[words])));
  return [element("h2", {}, "Most common phrases"), element("p", { class: "note" },
    `Of ${wholeNumber(data.sampled)} documents. What stands in most of them is often a header, a `
    + "menu or a licence that a filter could remove."), element("div", { class: "phrases" }, cards)];
}

function dropped() {
  if (!data.dropped) return [];
  const { lines, kept, reasons, examples } = data.dropped;
  const words = `${wholeNumber(lines)} lines read, ${wholeNumber(kept)} documents kept.`;
  if (!reasons.length) return [element("h2", {}, "Dropped"), element("p", { class: "note" }, words)];
  const rows = examples.slice(0, 60).map((one) => [element("th", { scope: "row" }, one.reason),
    element("td", { class: "path" }, one.origin), one.text]);
  return [element("h2", {}, "Dropped"), element("p", { class: "note" }, words),
    shareTable("Reason", reasons, lines, "Reasons"),
    element("h3", { class: "below" }, "The first of them"),
    tableCard(["Reason", "Where", "Text"], rows, "Lines that were dropped")];
}

function texts() {
  return [element("h2", {}, "Some documents"), data.texts.map((one) => element("details", { class: "card" },
    element("summary", {}, `${wholeNumber(one.document)}: ${one.text.slice(0, 70).replace(/\s+/g, " ")}`),
    element("p", { class: "note inside" }, `${one.origin ? `${one.origin}, ` : ""}${wholeNumber(one.tokens)} tokens`),
    element("pre", {}, one.text)))];
}

function footer() {
  return element("footer", {}, `Made with Gristmill on ${data.made.slice(0, 16).replace("T", " ")}.`);
}

document.getElementById("page").replaceChildren(...[header(), lengths(), sources(), languages(),
  phrases(), dropped(), texts(), footer()].flat(2));
followTheme();
