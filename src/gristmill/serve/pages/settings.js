// How answers are drawn: the form, what it means for a request, and keeping it.

import { byId, make } from "./dom.js";
import { recall, remember } from "./store.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", value: 0.8, min: 0, max: 10, hint: "0: the likeliest token" },
  { name: "max_tokens", label: "Max tokens", value: 256, min: 1, step: 1, hint: "of an answer" },
  { name: "top_k", label: "Top-k", value: 50, min: 0, step: 1, hint: "0: all tokens" },
  { name: "top_p", label: "Top-p", value: 1, min: 0.000001, max: 1, hint: "1: all tokens" },
  { name: "min_p", label: "Min-p", value: 0, min: 0, max: 1, hint: "0: all tokens" },
  { name: "repetition_penalty", label: "Repetition penalty", value: 1, min: 0.01, max: 10, hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", value: 0, min: -2, max: 2, hint: "0: none" },
];
/** Seeds are drawn from what is easily read and typed again. */
const SEEDS = 2 ** 31;

const form = byId("settings-form");
const seed = byId("seed");
const seedKinds = form.elements["seed-kind"];

/** Build the form with what was kept. */
export function prepareSettings() {
  for (const { name, label, value, min, max, step, hint } of NUMBERS) {
    const field = make("input", {
      type: "number", id: name, min: String(min), step: String(step ?? "any"), required: true,
      value: String(value), inputMode: "decimal", "aria-describedby": `${name}-hint`,
    });
    if (max !== undefined) field.max = String(max);
    byId("numbers").append(make("div", { class: "field" },
      make("label", { htmlFor: name, text: label }), field,
      make("p", { class: "hint", id: `${name}-hint`, text: hint })));
  }
  fill(recall("settings", {}));
  form.addEventListener("input", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("reset").onclick = () => {
    fill({});
    keep();
  };
}

function fill(kept) {
  for (const { name, value } of NUMBERS) {
    const field = byId(name);
    field.value = String(Number.isFinite(kept?.[name]) ? kept[name] : value);
    if (!field.checkValidity()) field.value = String(value);
  }
  seed.value = String(Number.isSafeInteger(kept?.seed) ? kept.seed : 1337);
  seedKinds.value = kept?.fixed === true ? "fixed" : "new";
  byId("stop-texts").value = typeof kept?.stop === "string" ? kept.stop : "";
  seed.disabled = seedKinds.value !== "fixed";
}

function keep(event) {
  seed.disabled = seedKinds.value !== "fixed";
  // The system message belongs to its conversation.
  if (event?.target.id === "system" || !form.checkValidity()) return;
  const kept = { seed: seed.valueAsNumber, fixed: seedKinds.value === "fixed" };
  for (const { name } of NUMBERS) kept[name] = byId(name).valueAsNumber;
  remember("settings", { ...kept, stop: byId("stop-texts").value });
}

/** Whether all numbers are possible ones; if not, show the first that is not. */
export function settingsAreValid() {
  return form.checkValidity();
}

export function showInvalid() {
  form.reportValidity();
}

/** The settings of a request, without the seed. */
export function sampling() {
  const chosen = {};
  for (const { name } of NUMBERS) chosen[name] = byId(name).valueAsNumber;
  const stop = byId("stop-texts").value.split("\n").filter(Boolean)
    .map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (stop.length) chosen.stop = stop;
  return chosen;
}

export function drawSeed() {
  if (seedKinds.value === "fixed") return seed.valueAsNumber;
  return crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;
}

/** From now on, always this one. */
export function fixSeed(number) {
  seedKinds.value = "fixed";
  seed.value = String(number);
  keep();
}
