// Talking to the server: requests, the binary answer with curves, and the stream of events.

/** Where the server's paths begin: this file is static/api.js, also behind a proxy's prefix. */
const ROOT = new URL("..", import.meta.url);
/** Milliseconds without a byte after which a stream is given up; keep-alives come more often. */
const SILENCE = 40_000;

let token = "";
try {
  token = sessionStorage.getItem("gristmill.token") ?? "";
} catch {
  // Without storage the token lasts as long as the page.
}

/** Take the token out of the address, so that a link that is passed on does not hold it. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.has("token")) return;
  useToken(given.get("token"));
  given.delete("token");
  history.replaceState(null, "", `#${given}`);
}
export function useToken(text) {
  token = text;
  try {
    sessionStorage.setItem("gristmill.token", text);
  } catch {
    // See above.
  }
}
export const hasToken = () => token !== "";

/** Why there is no answer: `lost` is true if the server was not reached. */
export class Failure extends Error {
  constructor(message, { lost = false, status = 0 } = {}) {
    super(message);
    this.lost = lost;
    this.status = status;
  }
}
export const stopped = (error) => error instanceof DOMException && error.name === "AbortError";

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
      cache: "no-store", credentials: "same-origin",
    });
  } catch (error) {
    if (stopped(error)) throw error;
    throw new Failure("The server does not answer.", { lost: true });
  }
  if (response.ok) return response;
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    // What a proxy sends is often no JSON.
  }
  const { status } = response;
  const lost = (status === 502 || status === 504) && !message;
  throw new Failure(message || `The server refused this (status ${status}).`, { lost, status });
}

export async function getJson(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (stopped(error)) throw error;
    throw new Failure("The connection was lost.", { lost: true });
  }
}

export async function getCurves(path, options) {
  const response = await request(path, options);
  let buffer;
  try {
    buffer = await response.arrayBuffer();
  } catch (error) {
    if (stopped(error)) throw error;
    throw new Failure("The connection was lost.", { lost: true });
  }
  return decodeCurves(buffer);
}

/** The curves of a binary answer: [{ run, name, generation, revision, first, x, mean, low, high }].
 *
 *   uint32 bytes of the header | header, JSON | for each entry x float64, mean float32 and, with a
 *   band, low and high float32, then padding to a multiple of 8
 */
export function decodeCurves(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const take = (Kind, points) => {
    const found = new Kind(buffer, at, points);
    at += found.byteLength;
    return found;
  };
  return header.entries.map(([run, name, generation, first, points, band]) => {
    const x = take(Float64Array, points), mean = take(Float32Array, points);
    const low = band ? take(Float32Array, points) : null;
    const high = band ? take(Float32Array, points) : null;
    at = Math.ceil(at / 8) * 8;
    const revision = header.revisions?.[run] ?? 0;
    return { run: header.runs[run], name: header.names[name], generation, revision, first, x, mean,
      low, high };
  });
}

/** Read the stream of events after a version to its end: `ontold(kind, data)` for each. */
export async function readEvents({ version, signal, onopen, ontold }) {
  const response = await request(`api/events?version=${version}`, { signal });
  onopen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", timer = 0;
  const lost = () => new Failure("The connection was lost.", { lost: true });
  const silence = () => new Promise((_, reject) => {
    timer = setTimeout(() => reject(lost()), SILENCE);
  });
  try {
    for (;;) {
      let part;
      try {
        part = await Promise.race([reader.read(), silence()]);
      } catch (error) {
        if (stopped(error)) throw error;
        throw lost();
      } finally {
        clearTimeout(timer);
      }
      if (part.done) return;
      const blocks = (rest + part.value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) tellBlock(block, ontold);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function tellBlock(block, ontold) {
  let kind = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (data.length) ontold(kind, JSON.parse(data.join("\n")));
}
