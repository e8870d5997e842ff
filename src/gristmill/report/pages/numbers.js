// Numbers as people read them, and the ticks of an axis.

const SUFFIXES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
export const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** 1234567 as 1.23M. */
export function count(value) {
  if (missing(value)) return "–";
  for (const [size, letter] of SUFFIXES)
    if (Math.abs(value) >= size * 0.9995 && Math.abs(value) < 1e16) {
      return `${+(value / size).toPrecision(3)}${letter}`;
    }
  return `${+value.toPrecision(3)}`;
}

/** Seconds as 2d 3h, 4m 5s or 0.12s. */
export function span(seconds) {
  if (missing(seconds)) return "–";
  if (Math.abs(seconds) < 1e-12) return "0s";
  if (seconds < 0) return `-${span(-seconds)}`;
  if (seconds < 0.001) return `${+(seconds * 1e6).toPrecision(3)}µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)}ms`;
  if (seconds < 60) return `${+seconds.toPrecision(2)}s`;
  const whole = Math.round(seconds), d = Math.floor(whole / 86400), h = Math.floor(whole / 3600) % 24;
  const m = Math.floor(whole / 60) % 60, s = whole % 60;
  const parts = [[d, "d"], [h, "h"], [m, "m"], [s, "s"]];
  const first = parts.findIndex(([amount]) => amount > 0);
  const leading = parts.slice(first, first + 2).filter(([amount]) => amount > 0);
  return leading.map(([amount, unit]) => amount + unit).join(" ");
}

export const fixed = (digits) => (value) => missing(value) ? "–" : value.toFixed(digits);
export const significant = (digits) => (value) =>
  missing(value) ? "–" : `${+value.toPrecision(digits)}`;
export function small(value) {
  if (missing(value)) return "–";
  return value === 0 ? "0" : value.toExponential(2).replace(/\.?0+e/, "e");
}
export const percent = (value) => missing(value) ? "–" : `${(value * 100).toFixed(1)}%`;
export const percentish = (value) => missing(value) ? "–" : `${significant(3)(value * 100)}%`;
export const wholeNumber = (value) => missing(value) ? "–" : Math.round(value).toLocaleString("en");
export function byteSize(value) {
  if (missing(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = Math.floor(Math.log2(Math.max(Math.abs(value), 1)) / 10);
  const index = Math.min(power, units.length - 1);
  return `${significant(3)(value / 2 ** (10 * index))} ${units[index]}`;
}
export const gibibytes = (value) =>
  missing(value) ? "–" : `${significant(3)(value / 2 ** 30)} GiB`;
/** Any number with enough digits to tell it from its neighbours. */
export function plainNumber(value) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return small(value);
  return Number.isInteger(value) && size < 1e6 ? wholeNumber(value)
    : size >= 1e6 ? count(value) : significant(5)(value);
}

/** What charts can have on their x axis, and how a place on it is told. */
export const AXES = {
  step: { label: "Steps", unit: "step", at: (value) => `step ${wholeNumber(value)}` },
  tokens: { label: "Tokens", unit: "tokens", at: (value) => `${count(value)} tokens` },
  seconds: { label: "Time", unit: "seconds", at: (value) => `after ${span(value)}` },
  flops: { label: "FLOPs", unit: "FLOPs", at: (value) => `${small(value)} FLOPs` },
};

/* ---- ticks ---- */

export function niceStep(size, steps = [1, 2, 2.5, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(size));
  return power * steps.find((step) => step * power >= size * 0.999999);
}
const CLOCK = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
];
export function timeStep(size) {
  if (size < 1) return niceStep(size);
  return CLOCK.find((step) => step >= size) || 86400 * niceStep(size / 86400, [1, 2, 5, 10]);
}
export function linearTicks(low, high, step) {
  const found = [];
  const last = Math.floor(high / step + 1e-9);
  for (let index = Math.ceil(low / step - 1e-9); index <= last && found.length < 100; index++) {
    found.push(index * step);
  }
  return found;
}
export function logTicks(low, high, wanted) {
  if (high / low < 8) return linearTicks(low, high, niceStep((high - low) / wanted));
  const decades = Math.log10(high / low);
  const every = Math.max(1, Math.ceil(decades / (wanted * 1.5)));
  const leads = decades > wanted / 2 ? [1] : decades > wanted / 4 ? [1, 3] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every !== 0) continue;
    for (const lead of leads) {
      const value = lead * 10 ** power;
      if (value >= low * 0.9999 && value <= high * 1.0001) found.push(value);
    }
  }
  return found;
}
/** Ticks of one axis carry the same suffix and as many decimals as telling them apart takes. */
export function tickText(value, step, largest) {
  if (value === 0) return "0";
  if (largest >= 1e16 || largest < 1e-4) return small(value);
  const [size, letter] = SUFFIXES.find(([one]) => largest >= one) || [1, ""];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  const whole = Number.isInteger(+(step / size * 10 ** decimals).toFixed(6));
  return `${+(value / size).toFixed(Math.min(whole ? decimals : decimals + 1, 8))}${letter}`;
}
