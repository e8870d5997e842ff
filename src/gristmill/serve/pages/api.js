// Talking to the server: one request, a stream, and what can go wrong with either.

/** Where the server's paths begin: this file is static/api.js, also behind a proxy's prefix. */
const ROOT = new URL("..", import.meta.url);

let key = "";
try {
  key = sessionStorage.getItem("gristmill.key") ?? "";
} catch {
  // Without storage the key lasts as long as the page.
}

export function useKey(text) {
  key = text;
  try {
    sessionStorage.setItem("gristmill.key", text);
  } catch {
    // See above.
  }
}

/** Why the server gave no answer, or not all of it. */
export class Failure extends Error {
  /** kind: "offline", "key", "busy", "refused" or "broken"; wait: seconds, when busy. */
  constructor(kind, message, wait = 0) {
    super(message);
    this.kind = kind;
    this.wait = wait;
  }
}

/** Whether the user stopped it, which is no failure. */
export const stopped = (error) => error instanceof DOMException && error.name === "AbortError";

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (stopped(error)) throw error;
    throw new Failure("offline", "The server does not answer.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let message = "";
  let code = "";
  try {
    const { error } = await response.json();
    message = error?.message ?? "";
    code = error?.code ?? "";
    if (code === "context_length_exceeded") {
      message += ". Shorten an earlier message, or begin a new conversation.";
    }
  } catch {
    // What a proxy sends is often no JSON.
  }
  const { status } = response;
  if (status === 401) return new Failure("key", message || "The server asks for a key.");
  // A model that cannot be loaded will not be loaded a moment later either.
  if (status === 429 || (status === 503 && code !== "model_unusable")) {
    const text = message || (status === 429 ? "The server is busy." : "The server is not ready.");
    return new Failure("busy", text, secondsOf(response.headers.get("Retry-After")));
  }
  // The server itself says why; a proxy in front of it says so when it does not answer.
  if ((status === 502 || status === 504) && !message) {
    return new Failure("offline", "The server behind the proxy does not answer.");
  }
  return new Failure("refused", message || `The server refused this (status ${status}).`);
}

/** Retry-After is a number of seconds or a date. */
function secondsOf(value) {
  const seconds = Number(value ?? "");
  if (value && Number.isFinite(seconds)) return Math.min(Math.max(seconds, 1), 600);
  const until = (Date.parse(value ?? "") - Date.now()) / 1000;
  return Number.isFinite(until) ? Math.min(Math.max(Math.ceil(until), 1), 600) : 3;
}

export async function listModels() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

/** How many tokens a text or messages have, as the server counts them. */
export async function countTokens(body, signal) {
  return (await request("tokenize", { body, signal })).json();
}

/** The chunks of a stream, as objects, up to its end. */
export async function* stream(path, body, signal) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (stopped(error)) throw error;
        throw new Failure("broken", "The connection was lost.");
      }
      if (part.done) throw new Failure("broken", "The connection was lost.");
      const lines = (rest + part.value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield chunkOf(data);
      }
    }
  } finally {
    // Whoever stops reading closes the connection, and the server stops generating.
    reader.cancel().catch(() => {});
  }
}

function chunkOf(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new Failure("broken", "The server sent something that is not understood.");
  }
  if (chunk.error) throw new Failure("broken", chunk.error.message ?? "The server failed.");
  return chunk;
}
