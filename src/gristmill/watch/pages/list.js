// The list of runs. Only the rows that can be seen are in the page, so a thousand runs stay fluent.

import { cssColour } from "./charts.js";
import { byId, counted, icon, say } from "./dom.js";
import { element } from "./elements.js";
import { count, fixed, missing, percent, span, wholeNumber } from "./numbers.js";

/** Pixels of a row; the style sheet has the same. */
const ROW = 70;
const MARGIN = 6;
const PIN = "M7.500 3h5l-.6 5.200 2.600 2.800v1.500H5.500V11l2.600-2.800zM10 12.500V17";

export class List {
  /** `runs` is the Runs; `onopen(id)` and `onraise(id or null)` tell what is done with a row. */
  constructor(runs, view, { onopen, onraise }) {
    Object.assign(this, { runs, view, onopen, onraise });
    this.place = byId("list");
    this.rows = byId("rows");
    this.listed = [];
    /** Elements by id, and what they show. */
    this.nodes = new Map();
    /** The row that the keyboard is at. */
    this.at = null;
    this.pending = 0;
    this.place.addEventListener("scroll", () => this.schedule(), { passive: true });
    new ResizeObserver(() => this.schedule()).observe(this.place);
    this.rows.addEventListener("keydown", (event) => this.pressed(event));
    this.rows.addEventListener("pointerleave", () => this.onraise(null));
  }

  schedule() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  /** Rows have changed, or what is searched. */
  update() {
    this.listed = this.runs.listed();
    const { size } = this.runs.rows, shown = this.runs.shown().length;
    const found = this.listed.length === size ? counted(size)
      : `${counted(this.listed.length)} of ${counted(size)}`;
    const text = size ? `${found}, ${counted(shown)} shown` : "";
    if (byId("run-count").textContent !== text) byId("run-count").textContent = text;
    if (!this.listed.some(({ id }) => id === this.at)) this.at = this.listed[0]?.id ?? null;
    this.schedule();
  }

  draw() {
    const { scrollTop, clientHeight } = this.place;
    this.rows.style.height = `${this.listed.length * ROW}px`;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - MARGIN);
    const last = Math.min(this.listed.length, Math.ceil((scrollTop + clientHeight) / ROW) + MARGIN);
    const window = this.listed.slice(first, last);
    const seen = new Set(window.map(({ id }) => id));
    for (const [id, node] of this.nodes) {
      // The row that has the focus stays, or the focus would be lost.
      if (seen.has(id) || (node.contains(document.activeElement) && this.runs.rows.has(id))) continue;
      node.remove();
      this.nodes.delete(id);
    }
    window.forEach((row, index) => {
      let node = this.nodes.get(row.id);
      if (!node) {
        node = this.rowNode(row.id);
        this.nodes.set(row.id, node);
        this.rows.append(node);
      }
      node.style.top = `${(first + index) * ROW}px`;
      node.setAttribute("aria-setsize", this.listed.length);
      node.setAttribute("aria-posinset", first + index + 1);
      this.fill(node, row);
    });
    this.inOrder();
  }

  /** The order of the elements is that of the rows, for the tab key and screen readers. */
  inOrder() {
    const nodes = [...this.rows.children];
    const place = (node) => Number(node.getAttribute("aria-posinset"));
    const sorted = [...nodes].sort((a, b) => place(a) - place(b));
    if (sorted.every((node, index) => node === nodes[index])) return;
    const { activeElement } = document;
    this.rows.append(...sorted);
    if (this.rows.contains(activeElement)) activeElement.focus({ preventScroll: true });
  }

  rowNode(id) {
    const show = element("input", { type: "checkbox", tabindex: "-1",
      onchange: () => this.runs.toggle(id) });
    const colour = element("input", { type: "color", class: "colour", tabindex: "-1",
      onchange: (event) => {
        this.view.set({ colours: { ...this.view.colours, [id]: event.target.value } });
      } });
    const title = element("span", { class: "name" });
    const loss = element("span", { class: "loss" });
    const facts = element("span", { class: "facts" });
    const more = element("span", { class: "more" });
    const bar = element("i", { "aria-hidden": "true" });
    const open = element("button", { type: "button", class: "open", onclick: () => {
      this.at = id;
      this.onopen(id);
    } }, element("span", { class: "title" }, title, loss), facts, more);
    const pin = element("button", { type: "button", class: "icon quiet pin", tabindex: "-1",
      onclick: () => this.pin(id) }, icon(PIN));
    const node = element("li", { onpointerenter: () => this.onraise(id) },
      element("span", { class: "marks" }, show, colour), open, pin,
      element("span", { class: "progress" }, bar));
    node.parts = { show, colour, title, loss, facts, more, bar, open, pin };
    node.run = id;
    open.addEventListener("focus", () => this.onraise(id));
    return node;
  }

  fill(node, row) {
    const { parts } = node, { view, runs } = this;
    const pinned = view.pin.includes(row.id), shown = runs.isShown(row.id);
    const current = view.open === row.id, colour = shown ? runs.colourOf(row.id) : "--muted";
    const state = JSON.stringify([row, pinned, shown, current, colour, this.at === row.id]);
    if (node.state === state) return;
    node.state = state;
    parts.title.textContent = row.name;
    parts.title.title = row.folder;
    parts.open.setAttribute("aria-current", current ? "true" : "false");
    parts.open.tabIndex = this.at === row.id ? 0 : -1;
    node.classList.toggle("off", !shown);
    node.classList.toggle("pinned", pinned);
    parts.show.checked = shown;
    parts.show.setAttribute("aria-label", `Show ${row.name}`);
    parts.show.style.accentColor = cssColour(colour);
    parts.colour.setAttribute("aria-label", `Colour of ${row.name}`);
    parts.colour.style.color = cssColour(colour);
    parts.colour.value = hexOf(getComputedStyle(parts.colour).color);
    parts.pin.setAttribute("aria-pressed", String(pinned));
    parts.pin.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin"} ${row.name}`);
    parts.loss.textContent = missing(row.loss) ? "" : fixed(4)(row.loss);
    parts.loss.title = "Loss: mean of the last records";
    parts.facts.replaceChildren(...factsOf(row));
    parts.more.textContent = moreOf(row);
    const part = row.read < 1 ? row.read : row.steps ? row.step / row.steps : 0;
    parts.bar.style.width = `${(100 * Math.min(1, part)).toFixed(1)}%`;
    parts.bar.parentElement.classList.toggle("reading", row.read < 1);
  }

  pin(id) {
    const { pin } = this.view;
    this.view.set({ pin: pin.includes(id) ? pin.filter((one) => one !== id) : [...pin, id] });
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const id = event.target.closest("li")?.run;
    if (!id || event.target.type === "color") return;
    const index = this.listed.findIndex((row) => row.id === id);
    const page = Math.max(1, Math.floor(this.place.clientHeight / ROW) - 1);
    const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page,
      Home: -this.listed.length, End: this.listed.length };
    const { name } = this.runs.rows.get(id) ?? {};
    if (event.key in moves) this.moveTo(index + moves[event.key]);
    else if (event.key === " " && event.target.type !== "checkbox") {
      this.runs.toggle(id);
      say(`${name} ${this.runs.isShown(id) ? "shown" : "hidden"}`);
    } else if (event.key === "o" || event.key === "O") {
      this.runs.showOnly([id]);
      say(`Only ${name} is shown`);
    } else if (event.key === "p" || event.key === "P") this.pin(id);
    else if (event.key === "c" || event.key === "C") this.nodes.get(id).parts.colour.showPicker();
    else return;
    event.preventDefault();
  }

  moveTo(index) {
    const at = Math.min(Math.max(index, 0), this.listed.length - 1);
    if (at < 0) return;
    this.at = this.listed[at].id;
    const top = at * ROW, { scrollTop, clientHeight } = this.place;
    if (top < scrollTop) this.place.scrollTop = top;
    if (top + ROW > scrollTop + clientHeight) this.place.scrollTop = top + ROW - clientHeight;
    this.draw();
    this.nodes.get(this.at)?.parts.open.focus({ preventScroll: true });
  }

  /** To the first row, as from the search above it. */
  focus() {
    this.moveTo(0);
  }
}

function factsOf(row) {
  const state = element("span", { class: `state ${row.state}` },
    element("i", { class: "dot", "aria-hidden": "true" }), row.state);
  const steps = row.steps ? `${wholeNumber(row.step)} / ${wholeNumber(row.steps)}`
    : `${wholeNumber(row.step)} steps`;
  if (row.read < 1) {
    return [state, element("span", {}, `reading ${Math.floor(row.read * 100)}%`)];
  }
  return [state, element("span", {}, missing(row.step) ? "no step yet" : steps)];
}

function moreOf(row) {
  return [
    row.state !== "running" && row.state !== "done" ? row.reason : null,
    row.state === "running" && !missing(row.eta) ? `${span(row.eta)} left` : null,
    missing(row.tokens_per_second) ? null : `${count(row.tokens_per_second)} tok/s`,
    missing(row.goodput) ? null : `goodput ${percent(row.goodput)}`,
  ].filter(Boolean).join(" · ");
}

/** A colour as the control for colours wants it. */
function hexOf(colour) {
  const canvas = hexOf.canvas ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
  return `#${[r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("")}`;
}
