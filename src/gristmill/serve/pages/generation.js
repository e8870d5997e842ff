// One answer: what is asked of the server, and what becomes of what it sends.

import { Failure, stopped, stream } from "./api.js";

/** How many alternatives a token shows. */
const ALTERNATIVES = 5;

/** Seconds below which the time between tokens is not measured well. */
const SHORT = 0.05;

/** What to ask for, from the messages or the text so far. */
export function requestOf({ mode, model, given, sampling, seed, alternatives, goesOn }) {
  const body = {
    model, ...sampling, seed, stream: true, stream_options: { include_usage: true },
  };
  // Probabilities are always asked for: they tell where one token ends and the next begins, which
  // comparing and counting need. Alternatives are not, unless someone wants to see them.
  const count = alternatives ? ALTERNATIVES : 0;
  if (mode === "prompt") {
    return { path: "v1/completions", body: { ...body, prompt: given, logprobs: count } };
  }
  Object.assign(body, { messages: given, logprobs: true, top_logprobs: count });
  if (goesOn) body.continue_final_message = true;
  return { path: "v1/chat/completions", body };
}

/** The tokens of a chunk, as [text, log probability, alternatives or null]. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => [
      token, logprob, top?.length ? top.map((other) => [other.token, other.logprob]) : null,
    ]);
  }
  return (logprobs.tokens ?? []).map((token, index) => {
    const top = Object.entries(logprobs.top_logprobs?.[index] ?? {});
    top.sort((one, other) => other[1] - one[1]);
    return [token, logprobs.token_logprobs[index], top.length ? top : null];
  });
}

/** Tokens per second; of those after the first, since what comes before it is the prompt's time. */
class Pace {
  start = performance.now();
  count = 0;
  first = 0;
  last = 0;

  add(count) {
    if (!count) return;
    this.last = performance.now();
    if (!this.count) {
      this.first = this.last;
      this.firstCount = count;
    }
    this.count += count;
  }

  get rate() {
    const seconds = (this.last - this.first) / 1000;
    // What came at once says nothing about how long each token took.
    if (seconds >= SHORT) return (this.count - this.firstCount) / seconds;
    return this.count ? this.count / Math.max((this.last - this.start) / 1000, 0.001) : null;
  }
}

/**
 * Let an answer grow until it ends. It never throws: how it ended is in `answer.end`.
 * `hooks`: changed(), waiting(seconds, message, now), askKey() which says whether there is one now.
 */
export async function grow(answer, request, signal, hooks) {
  const pace = new Pace();
  const before = answer.made;
  // Of an answer whose tokens were not kept, the text so far counts as one.
  if (answer.text && !answer.tokens.length) answer.tokens.push([answer.text, null, null]);
  answer.end = null;
  answer.rate = null;
  let reason = "stop";
  const take = (chunk) => {
    const choice = chunk.choices?.[0];
    if (choice) {
      const tokens = tokensOf(choice.logprobs);
      const text = choice.delta?.content ?? choice.text ?? "";
      answer.text += text;
      answer.tokens.push(...tokens);
      const count = tokens.length || (text ? 1 : 0);
      answer.made += count;
      pace.add(count);
      if (choice.finish_reason) reason = choice.finish_reason;
    }
    if (chunk.usage) {
      answer.made = before + chunk.usage.completion_tokens;
      answer.context = chunk.usage.total_tokens;
    }
    answer.rate = pace.rate;
    hooks.changed();
  };
  for (;;) {
    try {
      for await (const chunk of stream(request.path, request.body, signal)) take(chunk);
      const limit = answer.made - before >= request.body.max_tokens;
      answer.end = { reason: reason === "length" ? (limit ? "limit" : "context") : "stop" };
    } catch (error) {
      if (stopped(error)) answer.end = { reason: "user" };
      else if (error instanceof Failure) {
        if (await again(error, signal, hooks)) continue;
        answer.end = signal.aborted ? { reason: "user" }
          : { reason: error.kind, message: error.message };
      } else answer.end = { reason: "broken", message: String(error) };
    }
    break;
  }
  hooks.changed();
}

/** Whether the same request is worth another try, after waiting for what is missing. */
async function again(failure, signal, hooks) {
  if (failure.kind === "key") return hooks.askKey();
  if (failure.kind !== "busy") return false;
  return new Promise((resolve) => {
    let left = failure.wait;
    let timer = 0;
    const settle = (answer) => {
      clearInterval(timer);
      signal.removeEventListener("abort", stop);
      hooks.waiting(0);
      resolve(answer);
    };
    const stop = () => settle(false);
    const now = () => settle(true);
    timer = setInterval(() => {
      left -= 1;
      if (left <= 0) settle(true);
      else hooks.waiting(left, failure.message, now);
    }, 1000);
    signal.addEventListener("abort", stop);
    hooks.waiting(left, failure.message, now);
  });
}

/** Where nothing came, there is nothing that could break off: the reason stands alone. */
const brokenOff = (text, message) => (text ? `Broke off: ${message}`
  : message[0].toUpperCase() + message.slice(1));

/** Why an answer ended, in plain words. */
export function endInWords(answer) {
  const { reason, message } = answer.end ?? { reason: "left" };
  return {
    stop: "Finished",
    limit: `Stopped at the limit of ${answer.sampling?.max_tokens ?? "its"} tokens`,
    context: "The context is full",
    user: "Stopped by you",
    imported: "Imported",
    left: "Not finished",
    key: "Needs a key",
  }[reason] ?? brokenOff(answer.text, message || "the server failed");
}

/** Whether something went wrong, as opposed to an answer that came to its end. */
export const failed = (answer) => !["stop", "limit", "context", "user", "imported"]
  .includes(answer.end?.reason ?? "left");
