// The stream of what changes, and what to do when it breaks: say so, and try again.

import { Failure, readEvents, stopped, useToken } from "./api.js";
import { byId, notice, unnotice } from "./dom.js";
import { element } from "./elements.js";
import { span } from "./numbers.js";

/** Seconds before the next try, longer after each that failed. */
const WAITS = [1, 2, 4, 8, 15];

/** Milliseconds that a stream lasts at least if it is ended on purpose. */
const SHORTEST = 2000;

export class Connection {
  /** `onbegin()` asks for all rows and resolves to their version; it is called again after every
   * loss. `ontold(kind, data)` is called for each event. */
  constructor({ onbegin, ontold }) {
    Object.assign(this, { onbegin, ontold });
    this.failures = 0;
    /** When the last sign of life came; null before the first. */
    this.heard = null;
    this.online = false;
    this.timer = 0;
    setInterval(() => this.show(), 1000);
  }

  async start() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.controller?.abort();
    const { signal } = this.controller = new AbortController();
    try {
      let version = await this.onbegin();
      while (!signal.aborted) {
        const began = performance.now();
        await readEvents({
          version, signal,
          onopen: () => this.opened(),
          ontold: (kind, data) => {
            this.heard = Date.now();
            version = data.version ?? version;
            this.ontold(kind, data);
          },
        });
        // The server ends a stream after some minutes; one that ends at once was cut.
        if (performance.now() - began < SHORTEST) {
          throw new Failure("The connection was lost.", { lost: true });
        }
      }
    } catch (error) {
      if (!stopped(error) && !signal.aborted) this.lost(error);
    }
  }

  opened() {
    this.online = true;
    this.failures = 0;
    this.heard = Date.now();
    unnotice("connection");
    this.show();
  }

  /** A request or the stream failed. */
  lost(error) {
    if (!(error instanceof Failure)) throw error;
    if (error.status === 401) {
      this.online = false;
      askKey(error.message, () => this.start());
      return;
    }
    if (!error.lost && error.status < 500) {
      notice("refused", error.message, { bad: true });
      return;
    }
    this.online = false;
    this.why = error.lost ? "The connection to the server is lost." : error.message;
    const wait = WAITS[Math.min(this.failures, WAITS.length - 1)];
    if (!this.timer) {
      this.controller?.abort();
      this.failures += 1;
      this.next = Date.now() + 1000 * wait;
      this.timer = setTimeout(() => this.start(), 1000 * wait);
    }
    this.show();
  }

  show() {
    const place = byId("live");
    const state = this.online ? "live" : this.failures ? "lost" : "connecting";
    const texts = { live: "Live", lost: "Not connected", connecting: "Connecting" };
    if (place.dataset.state !== state) {
      place.dataset.state = state;
      place.lastElementChild.textContent = texts[state];
    }
    if (state !== "lost") return;
    const at = this.heard ? ` What is shown is from ${new Date(this.heard).toLocaleTimeString("sv")}.` : "";
    const wait = Math.max(0, Math.ceil((this.next - Date.now()) / 1000));
    const when = this.timer && wait ? ` Next try in ${span(wait)}.` : " Trying again.";
    const text = `${this.why}${at}`;
    const old = document.querySelector('[data-kind="connection"]');
    if (!old || old.dataset.text !== text) {
      notice("connection", text, { bad: true, actions: [["Try now", () => this.start()]] });
      document.querySelector('[data-kind="connection"]').dataset.text = text;
    }
    // The seconds are not part of the message: a screen reader would read it out each second.
    const button = document.querySelector('[data-kind="connection"] button');
    if (button) button.title = when.trim();
    place.title = when.trim();
  }
}

/** The server wants a key before it shows anything. */
function askKey(why, then) {
  const dialog = byId("confirm");
  const field = element("input", { type: "password", id: "key", autocomplete: "current-password",
    required: true });
  const send = (event) => {
    event.preventDefault();
    useToken(field.value.trim());
    dialog.close();
    then();
  };
  dialog.replaceChildren(element("form", { onsubmit: send },
    element("h2", { id: "confirm-title" }, "This server asks for a key"), element("p", {}, why),
    element("label", {}, "Key", field),
    element("div", { class: "answers" }, element("button", { class: "primary", type: "submit" }, "Use it"))));
  if (!dialog.open) dialog.showModal();
  field.focus();
}
