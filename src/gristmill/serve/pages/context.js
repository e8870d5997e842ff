// How much of the model's context is used: what the server counts, and since then what it has sent.

import { countTokens } from "./api.js";
import { byId, counted, settled } from "./dom.js";
import { last, messagesTo, textTo } from "./tree.js";

/** Milliseconds without a key before what is written is counted. */
const PAUSE = 300;

export class ContextMeter {
  /** `view()`: about (the model), online, running, conversation and draft, as they are now. */
  constructor(view) {
    this.view = view;
    this.base = 0;
    this.request = null;
    this.count = settled(() => this.ask(), PAUSE);
  }

  /** The count is known from elsewhere. */
  settle(count) {
    this.base = count ?? this.base;
  }

  /** What would be sent now; null if there is nothing to count. */
  body() {
    const { about, conversation, draft } = this.view();
    const end = last(conversation);
    if (conversation.mode === "prompt") {
      const text = textTo(conversation, end) + draft;
      return text ? { model: about.id, text } : null;
    }
    const messages = messagesTo(conversation, end);
    if (draft) messages.push({ role: "user", content: draft });
    return messages.length && about.chat !== false ? { model: about.id, messages } : null;
  }

  async ask() {
    const { about, online, running } = this.view();
    if (!online || !about || running) return;
    this.request?.abort();
    const body = this.body();
    if (!body) {
      this.base = 0;
      this.show();
      return;
    }
    this.request = new AbortController();
    const { signal } = this.request;
    try {
      const { count } = await countTokens(body, signal);
      if (signal.aborted || this.view().running) return;
      this.base = count;
      this.show();
    } catch {
      // It is a service to the reader; what matters says itself when the text is sent.
    }
  }

  show() {
    const { about, running } = this.view();
    const bar = byId("context-bar");
    const words = byId("context");
    bar.hidden = !about;
    if (!about) {
      words.textContent = "";
      return;
    }
    const answer = running?.node.answers[0];
    const count = answer ? answer.context ?? this.base + answer.made - running.before : this.base;
    bar.max = about.context;
    bar.value = Math.min(count, about.context);
    words.textContent = `${counted(count)} of ${counted(about.context)} tokens`;
    words.classList.toggle("bad", count >= about.context);
  }
}
