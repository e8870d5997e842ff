// Drawing one chart on a canvas: axes, bands, lines, whiskers, markers, and what a pointer shows.

import { AXES, count, linearTicks, logTicks, niceStep, small, span, tickText, timeStep }
  from "./numbers.js";

/** With more curves than this, each is its line alone: bands over bands would hide all of them. */
const MOST_BANDS = 12;
/** Curves with fewer points than this show them as dots. */
const FEW_POINTS = 60;

/** Fit a canvas to its place, sharp on any screen; returns its context in CSS pixels. */
function fitted(canvas, width, height) {
  const scale = Math.max(1, window.devicePixelRatio || 1);
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Where places and values lie: { box, domain, extent, toX, toY, fromX }. */
export function frameOf({ width, height, domain, extent, logX, logY }) {
  const box = { left: 54, right: width - 12, top: 10, bottom: height - 26 };
  const across = logX ? Math.log : (value) => value;
  const up = logY ? Math.log : (value) => value;
  const [left, right] = domain.map(across), [bottom, top] = extent.map(up);
  const run = (box.right - box.left) / (right - left || 1);
  const rise = (box.bottom - box.top) / (top - bottom || 1);
  return {
    box, domain, extent, logX, logY, width, height,
    toX: (value) => box.left + (across(value) - left) * run,
    toY: (value) => box.bottom - (up(value) - bottom) * rise,
    fromX: (x) => {
      const inside = Math.min(Math.max(x, box.left), box.right);
      const place = left + (inside - box.left) / run;
      return logX ? Math.exp(place) : place;
    },
  };
}

/** Draw all that does not depend on the pointer. */
export function paintChart(canvas, chart, frame, { paint, font, axis }) {
  const context = fitted(canvas, frame.width, frame.height);
  context.font = font;
  paintHeights(context, chart.spec, frame, paint);
  paintPlaces(context, frame, paint, axis);
  const { box } = frame;
  context.save();
  context.beginPath();
  context.rect(box.left - 4, box.top - 6, box.right - box.left + 11, box.bottom - box.top + 7);
  context.clip();
  paintMarkers(context, chart.markers, frame, paint);
  paintSeries(context, chart.series, frame, paint);
  context.restore();
}

function paintHeights(context, spec, { box, extent, toY, logY }, paint) {
  const factor = spec.factor || 1, low = extent[0] * factor, high = extent[1] * factor;
  const wanted = Math.max(4, Math.round((box.bottom - box.top) / 50));
  const step = niceStep((high - low) / wanted), wide = logY && high / low >= 8;
  const largest = Math.max(Math.abs(low), Math.abs(high));
  const word = spec.tick || (wide ? (value) => count(value) + (spec.suffix || "")
    : (value) => tickText(value, step, largest) + (spec.suffix || ""));
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const value of logY ? logTicks(low, high, wanted) : linearTicks(low, high, step)) {
    const y = Math.round(toY(value / factor)) + 0.5;
    context.strokeStyle = paint("--grid");
    line(context, box.left, y, box.right, y);
    context.fillStyle = paint("--muted");
    context.fillText(word(value), box.left - 8, y);
  }
}

function paintPlaces(context, { box, domain, toX, logX }, paint, axis) {
  const room = Math.max(2, Math.floor((box.right - box.left) / 76));
  const [low, high] = domain, size = (high - low) / room;
  const timed = axis === "seconds", flops = axis === "flops";
  let step = timed ? timeStep(size) : niceStep(size);
  if (axis === "step" || axis === "tokens") step = Math.max(step, 1);
  const spread = logX && high / low >= 8;
  const word = timed ? (value) => value ? span(value) : "0" : flops ? small
    : spread ? count : (value) => tickText(value, step, high);
  context.textBaseline = "alphabetic";
  context.strokeStyle = paint("--line");
  context.fillStyle = paint("--muted");
  context.lineWidth = 1;
  let taken = -Infinity;
  for (const value of logX ? logTicks(low, high, room) : linearTicks(low, high, step)) {
    const x = Math.round(toX(value)) + 0.5, text = word(value);
    const wide = context.measureText(text).width;
    const begin = Math.min(x - wide / 2, box.right + 10 - wide);
    line(context, x, box.bottom, x, box.bottom + 4);
    if (begin < taken + 8) continue;
    context.textAlign = "left";
    context.fillText(text, begin, box.bottom + 18);
    taken = begin + wide;
  }
  line(context, box.left, box.bottom + 0.5, box.right, box.bottom + 0.5);
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function paintSeries(context, series, frame, paint) {
  const few = series.length <= MOST_BANDS;
  context.lineJoin = few ? "round" : "bevel";
  for (const one of series) {
    if (one.whiskers || !(few || one.group)) continue;
    if (one.low && one.high) paintBand(context, one, frame, paint);
    if (one.raw) {
      context.globalAlpha = 0.28;
      context.lineWidth = 1;
      context.strokeStyle = paint(one.colour);
      tracePath(context, one.x, one.raw, frame);
      context.stroke();
      context.globalAlpha = 1;
    }
  }
  for (const one of series) {
    context.strokeStyle = context.fillStyle = paint(one.colour);
    // Without a GPU, browsers draw lines of one pixel ten times faster than wider ones.
    context.lineWidth = few ? 1.75 : 1;
    paintLine(context, one, frame);
  }
}

/** One curve with its dots and whiskers, in the colour and width that are set. */
function paintLine(context, one, frame) {
  context.setLineDash(one.dashes ?? []);
  tracePath(context, one.x, one.y, frame);
  context.stroke();
  context.setLineDash([]);
  const { toX, toY, domain, box } = frame;
  if (one.whiskers && one.low) {
    context.lineWidth = 1.25;
    for (let index = 0; index < one.x.length; index++) {
      const low = toY(one.low[index]), high = toY(one.high[index]);
      if (!Number.isFinite(low + high)) continue;
      const x = toX(one.x[index]);
      line(context, x, low, x, high);
      line(context, x - 3, low, x + 3, low);
      line(context, x - 3, high, x + 3, high);
    }
  }
  if (one.x.length > (one.sparse ? FEW_POINTS : 1)) return;
  for (let index = 0; index < one.x.length; index++) {
    if (one.x[index] < domain[0] || one.x[index] > domain[1]) continue;
    const y = toY(one.y[index]);
    if (!Number.isFinite(y) || y > box.bottom + 4) continue;
    context.beginPath();
    context.arc(toX(one.x[index]), y, 2.6, 0, 7);
    context.fill();
  }
}

/** The part of a curve between two places and one point to either side. */
function inside(x, [low, high]) {
  let first = 0, last = x.length;
  while (first < last && x[first + 1] < low) first++;
  while (last > first && x[last - 2] > high) last--;
  return [first, last];
}

function tracePath(context, x, y, { toX, toY, domain }) {
  const [first, last] = inside(x, domain);
  let pen = false;
  context.beginPath();
  for (let index = first; index < last; index++) {
    const height = toY(y[index]);
    if (!Number.isFinite(height)) {
      // A point between two gaps would not be seen.
      pen = false;
      continue;
    }
    const across = toX(x[index]);
    if (!Number.isFinite(across)) continue;
    if (pen) context.lineTo(across, height);
    else context.moveTo(across, height);
    pen = true;
  }
}

function paintBand(context, one, { toX, toY, domain, box }, paint) {
  const [first, last] = inside(one.x, domain);
  const level = (value) => {
    const height = toY(value);
    return Number.isFinite(height) ? height : box.bottom + 9;
  };
  const there = (index) => !Number.isNaN(one.low[index]) && Number.isFinite(toX(one.x[index]));
  context.globalAlpha = one.group ? 0.2 : 0.13;
  context.fillStyle = paint(one.colour);
  context.beginPath();
  for (let index = first; index < last; index++) {
    if (there(index)) context.lineTo(toX(one.x[index]), level(one.high[index]));
  }
  for (let index = last - 1; index >= first; index--) {
    if (there(index)) context.lineTo(toX(one.x[index]), level(one.low[index]));
  }
  context.fill();
  context.globalAlpha = 1;
}

/** Thin lines where something happened; checkpoints are marks at the foot of the chart. */
function paintMarkers(context, markers, { toX, box, domain }, paint) {
  for (const marker of markers) {
    if (marker.x < domain[0] || marker.x > domain[1]) continue;
    const x = Math.round(toX(marker.x)) + 0.5;
    context.strokeStyle = context.fillStyle = paint(marker.colour);
    context.lineWidth = 1;
    if (marker.kind === "checkpoint") {
      context.globalAlpha = 0.75;
      context.beginPath();
      context.moveTo(x - 4, box.bottom);
      context.lineTo(x + 4, box.bottom);
      context.lineTo(x, box.bottom - 7);
      context.fill();
    } else {
      context.globalAlpha = 0.6;
      context.setLineDash([2, 3]);
      line(context, x, box.top, x, box.bottom);
      context.setLineDash([]);
      context.globalAlpha = 1;
      context.beginPath();
      context.arc(x, box.top, 3.5, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
  }
}

/** What moves with the pointer: the crosshair, its points, the curve pointed at, a selection. */
export function paintPointer(canvas, frame, { place, found, selection, raised, paint }) {
  const context = fitted(canvas, frame.width, frame.height);
  const { box, toX, toY, domain } = frame;
  context.save();
  context.beginPath();
  context.rect(box.left - 5, box.top - 6, box.right - box.left + 12, box.bottom - box.top + 12);
  context.clip();
  if (selection) {
    const [left, right] = [Math.min(...selection), Math.max(...selection)].map(toX);
    context.globalAlpha = 0.15;
    context.fillStyle = paint("--accent");
    context.fillRect(left, box.top, right - left, box.bottom - box.top);
    context.globalAlpha = 1;
  }
  for (const one of raised) {
    context.strokeStyle = context.fillStyle = paint("--card");
    context.lineWidth = 6;
    tracePath(context, one.x, one.y, frame);
    context.stroke();
    context.strokeStyle = context.fillStyle = paint(one.colour);
    context.lineWidth = 3;
    paintLine(context, { ...one, whiskers: false }, frame);
  }
  if (place !== null && place >= domain[0] && place <= domain[1]) {
    context.strokeStyle = paint("--muted");
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    const x = Math.round(toX(place)) + 0.5;
    line(context, x, box.top, x, box.bottom);
    context.setLineDash([]);
    context.strokeStyle = paint("--card");
    context.lineWidth = 1.5;
    for (const { one, at } of found) {
      const y = toY(at.y);
      if (!(y >= box.top - 4 && y <= box.bottom + 1)) continue;
      context.fillStyle = paint(one.colour);
      context.beginPath();
      context.arc(toX(at.x), y, found.length > 20 ? 2.5 : 4, 0, 7);
      context.fill();
      context.stroke();
    }
  }
  context.restore();
}

/** What a chart shows, in words. */
export function describeChart(spec, series, axis) {
  const parts = series.slice(0, 12).map(({ label, y }) => {
    const known = Array.from(y).filter((value) => !Number.isNaN(value));
    const [first, last] = [known[0], known[known.length - 1]].map(spec.show);
    return known.length ? `${label} from ${first} to ${last}` : label;
  });
  if (series.length > 12) parts.push(`${series.length - 12} more`);
  return `${spec.title} by ${AXES[axis].label.toLowerCase()}: ${parts.join("; ") || "nothing shown"}`;
}
