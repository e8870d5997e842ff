// What charts there are: for the name of a curve its title, unit, and how its values are told.

import {
  byteSize, count, fixed, gibibytes, percent, percentish, plainNumber, significant, small, span,
  wholeNumber,
} from "./numbers.js";

const seconds = { show: span, zero: true, robust: true, smooth: true };
const share = { show: percent, factor: 100, suffix: "%", zero: true };
const memory = { show: gibibytes, factor: 2 ** -30, zero: true };
const rate = { show: (value) => `${byteSize(value)}/s`, factor: 2 ** -20, zero: true,
  unit: "MiB per second" };

/** Curves of steps and validations that are known; a section is a heading of the page. */
const KNOWN = {
  loss: { section: "Training", title: "Loss", unit: "nats per token", show: fixed(4), smooth: true,
    wide: true, overlay: "validation.loss" },
  "validation.loss": { section: "Training", title: "Validation loss", unit: "nats per token",
    show: fixed(4) },
  lr: { section: "Training", title: "Learning rate", show: small, tick: small, zero: true },
  grad_norm: { section: "Training", title: "Gradient norm", unit: "before clipping",
    show: significant(4), smooth: true, robust: true, zero: true },
  tokens_per_second: { section: "Speed", title: "Throughput", unit: "tokens per second", show: count,
    smooth: true, zero: true },
  mfu: { section: "Speed", title: "Model FLOP utilization", unit: "share of the device's peak",
    ...share, smooth: true },
  mfu_causal: { section: "Speed", title: "Model FLOP utilization, causal",
    unit: "share of the device's peak", ...share, smooth: true },
  tflops: { section: "Speed", title: "Model TFLOP/s", unit: "per device", show: significant(4),
    smooth: true, zero: true },
  tflops_causal: { section: "Speed", title: "Model TFLOP/s, causal", unit: "per device",
    show: significant(4), smooth: true, zero: true },
  step_seconds: { section: "Speed", title: "Time of a step", unit: "seconds", ...seconds },
  data_wait: { section: "Speed", title: "Waited for data", unit: "seconds of a step", ...seconds },
  sync_wait: { section: "Speed", title: "Waited for others",
    unit: "seconds of a step, in the first process", ...seconds },
  memory_bytes: { section: "Speed", title: "Memory", unit: "GiB, the most so far", ...memory },
  skipped: { section: "Training", title: "Skipped steps", unit: "so far", show: wholeNumber,
    zero: true },
  nan: { section: "Other", title: "Steps that were not finite", unit: "so far",
    show: wholeNumber, zero: true },
  loss_scale: { section: "Training", title: "Loss scale", show: count, log: true },
  "validation.perplexity": { section: "Validation", title: "Perplexity", unit: "validation",
    show: significant(4) },
  "validation.bits_per_byte": { section: "Validation", title: "Bits per byte", unit: "validation",
    show: fixed(4) },
  "validation.train_loss": { section: "Validation", title: "Loss on training text",
    unit: "nats per token", show: fixed(4) },
  "validation.consensus_distance": { section: "Exchanges between workers",
    title: "Distance to the average", unit: "of the workers, relative to its norm",
    show: percentish, factor: 100, suffix: "%", zero: true },
  sent_bytes: { section: "Exchanges between workers", title: "Sent to other workers",
    unit: "GiB so far, by the first process", show: byteSize, factor: 2 ** -30, zero: true },
  mixing: { section: "Exchanges between workers", title: "Mixing",
    unit: "how far workers move to their group's average", show: significant(3), zero: true },
};
/** Curves of each source of the training text, and of each further set of validation text. */
const PARTS = {
  "source.loss": { section: "Training", title: "Loss by source", unit: "nats per token",
    show: fixed(4), smooth: true, order: 1.5 },
  "source.tokens": { section: "Training", title: "Tokens by source", unit: "so far", show: count,
    zero: true, order: 90 },
  "domain.loss": { section: "Validation", title: "Loss by domain", unit: "nats per token",
    show: fixed(4), sparse: true, order: 1 },
  "domain.perplexity": { section: "Validation", title: "Perplexity by domain", unit: "validation",
    show: significant(4), sparse: true, order: 2 },
  "domain.bits_per_byte": { section: "Validation", title: "Bits per byte by domain",
    unit: "validation", show: fixed(4), sparse: true, order: 3 },
};
/** How the lines of parts differ where their colour tells the run. */
export const PART_DASHES = [null, [6, 4], [2, 3], [10, 3, 2, 3]];
const SYSTEM = {
  gpu_use: { title: "GPU use", ...share },
  gpu_memory_bytes: { title: "GPU memory", unit: "GiB, of the fullest", ...memory },
  gpu_watts: { title: "GPU power", unit: "watts, all together", show: significant(4), zero: true },
  gpu_celsius: { title: "GPU temperature", unit: "°C, of the hottest", show: significant(3) },
  gpu_mhz: { title: "GPU clock", unit: "MHz, of the slowest", show: wholeNumber },
  cpu_use: { title: "CPU use", ...share },
  ram_bytes: { title: "Memory of the host", unit: "GiB", ...memory },
  disk_read: { title: "Read from disk", ...rate },
  disk_write: { title: "Written to disk", ...rate },
  disk_free: { title: "Free on disk", unit: "GiB", ...memory, zero: false },
  net_sent: { title: "Sent over the network", ...rate },
  net_received: { title: "Received over the network", ...rate },
};
/** The order of sections; those that nobody knows come last. */
export const SECTIONS = [
  "Training", "Speed", "Validation", "Evaluations", "Exchanges between workers", "System", "Other",
];
const ORDER = Object.keys(KNOWN);
const SYSTEM_ORDER = Object.keys(SYSTEM);

const words = (name) => {
  const text = name.replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
};

/** Whether more of a score is better, from its name. */
export const higherIsBetter = (metric) =>
  /^(acc|core|exact|f1|em\b|bleu|rouge|pass|score)/.test(metric);

/** The chart of a curve: { id, section, title, unit, show, …, part }. Curves of several hosts share
 * one chart; `part` is then what tells its lines apart. */
export function chartOf(name) {
  if (KNOWN[name]) return { id: name, order: ORDER.indexOf(name), ...KNOWN[name] };
  const [kind, ...rest] = name.split(".");
  if (kind === "evaluation" && rest.length > 1) {
    const metric = rest.pop(), task = rest.join(".");
    const better = higherIsBetter(metric) ? "higher is better" : "";
    const unit = [metric.replaceAll("_", " "), better].filter(Boolean).join(", ");
    return { id: name, section: "Evaluations", title: task, unit, show: significant(4),
      whiskers: true, sparse: true, order: 0 };
  }
  if (kind === "system" && rest.length > 1) {
    const field = rest.pop(), host = rest.join(".");
    const known = SYSTEM[field] ?? { title: words(field), show: plainNumber };
    const order = SYSTEM_ORDER.indexOf(field);
    return { id: `system.${field}`, section: "System", part: host, ...known,
      order: order < 0 ? 99 : order };
  }
  if (["source", "validation"].includes(kind) && rest.length > 1) {
    const field = rest.pop(), id = `${kind === "source" ? kind : "domain"}.${field}`;
    const known = PARTS[id] ?? { section: "Other", title: `${words(field)} by ${id.split(".")[0]}`,
      show: plainNumber, order: 60 };
    return { id, part: rest.join("."), parted: true, ...known };
  }
  if (kind === "validation" && rest.length) {
    const what = rest.join(".");
    const own = ["windows", "seconds"].includes(what);
    return { id: name, section: own ? "Other" : "Validation", title: words(what), unit: "validation",
      show: what === "seconds" ? span : plainNumber, order: 50 };
  }
  return { id: name, section: "Other", title: words(name), show: plainNumber, smooth: true, order: 0 };
}

/** What an event is: a mark at the foot of charts, or a line through them; null for neither. */
export function markerKind({ level, text }) {
  if (/^saved checkpoint/.test(text)) return "checkpoint";
  if (/went back|rolled back|rollback/i.test(text)) return "rollback";
  if (/^resum|^continue/i.test(text)) return "resume";
  return level === "warning" || level === "error" ? level : null;
}
export const MARKER_COLOURS = {
  checkpoint: "--muted", rollback: "--bad", resume: "--good", warning: "--warn", error: "--bad",
};
