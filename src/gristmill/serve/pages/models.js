// The models of the server: which there are, which are chosen, and waiting for a server.

import { listModels, useKey } from "./api.js";
import { byId, counted, make, notice, unnotice } from "./dom.js";
import { recall, remember } from "./store.js";

/** Seconds between attempts while the server is down. */
const RETRY = 3;

const select = byId("model");
const other = byId("other-model");
const compare = byId("compare");

export class Models {
  /** `changed()` is called when there are other models, or others are chosen. */
  constructor(changed) {
    this.changed = changed;
    this.known = new Map();
    this.comparing = recall("comparing", false) === true;
    this.online = false;
    this.asking = null;
    select.onchange = () => this.chosen();
    other.onchange = () => this.chosen();
    compare.onclick = () => {
      this.comparing = !this.comparing;
      remember("comparing", this.comparing);
      this.show();
      this.changed();
    };
    // A run may have written checkpoints while the page was in the background.
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible" && this.online) this.load();
    });
    this.prepareKey();
    this.show();
  }

  get first() { return select.value; }
  get second() { return other.value; }

  /** The ids that answer now: one, or two to compare. */
  get answering() {
    return this.comparing && this.second ? [this.first, this.second] : [this.first];
  }

  about(id) { return this.known.get(id); }

  chosen() {
    remember("models", [this.first, this.second]);
    this.changed();
  }

  /** Choose a model if the server has it. */
  choose(id) {
    if (this.known.has(id)) select.value = id;
  }

  /** Ask the server which models it has, until it answers. */
  async load() {
    clearTimeout(this.timer);
    try {
      const list = await listModels();
      this.known = new Map(list.map((model) => [model.id, model]));
      this.online = true;
      unnotice("server");
    } catch (error) {
      if (error.kind === "key") {
        if (await this.askKey()) return this.load();
        this.down("The server asks for an API key.", [["Enter the key", () => this.load()]]);
        return undefined;
      }
      this.down(error.kind === "offline" ? "The server does not answer. Trying again every "
        + `${RETRY} seconds.` : error.message, [["Try now", () => this.load()]]);
      if (error.kind === "offline" || error.kind === "busy") {
        this.timer = setTimeout(() => this.load(), 1000 * RETRY);
      }
      return undefined;
    }
    this.fill();
    this.changed();
    return undefined;
  }

  /** The server is gone: say so, and look for it. */
  lost() {
    if (!this.online) return;
    this.load();
  }

  down(text, actions) {
    const was = this.online || this.told !== text;
    this.online = false;
    this.told = text;
    // Each further attempt would only repeat what is there already.
    const there = [...byId("notices").children].some((box) => box.dataset.kind === "server");
    if (was || !there) notice("server", text, { bad: true, actions });
    this.changed();
  }

  fill() {
    const [first, second] = recall("models", [])?.map?.(String) ?? [];
    const wanted = select.value || first;
    const wantedOther = other.value || second;
    for (const place of [select, other]) {
      place.replaceChildren(...[...this.known.values()].map((model) => make("option", {
        value: model.id, text: this.label(model),
      })));
    }
    const ids = [...this.known.keys()];
    select.value = this.known.has(wanted) ? wanted : ids[0] ?? "";
    other.value = this.known.has(wantedOther) ? wantedOther
      : ids.find((id) => id !== select.value) ?? "";
    this.show();
  }

  label({ id, step }) {
    const plain = step === null || step === undefined || id.includes("@");
    // On a phone there is no room for more than the name.
    return plain || innerWidth < 700 ? id : `${id} (step ${counted(step)})`;
  }

  show() {
    compare.setAttribute("aria-pressed", String(this.comparing));
    other.hidden = !this.comparing;
    document.querySelector("label[for=other-model]").hidden = !this.comparing;
    document.body.classList.toggle("comparing", this.comparing);
  }

  prepareKey() {
    this.dialog = byId("key");
    byId("key-cancel").onclick = () => this.dialog.close();
    this.dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      this.dialog.close("use");
    };
  }

  /** Ask for the key, once however many requests need it; whether one was given. */
  askKey() {
    this.asking ??= new Promise((resolve) => {
      const field = byId("key-text");
      if (this.tried) byId("key-why").textContent = "The server does not accept this key.";
      this.dialog.returnValue = "";
      this.dialog.showModal();
      field.select();
      this.dialog.onclose = () => {
        this.asking = null;
        const given = this.dialog.returnValue === "use" && field.value !== "";
        if (given) {
          this.tried = true;
          useKey(field.value.trim());
        }
        resolve(given);
      };
    });
    return this.asking;
  }
}
