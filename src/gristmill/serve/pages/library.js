// The list of conversations: search, rename, delete.

import { byId, icon, make, notice, unnotice } from "./dom.js";
import { matches, titleOf } from "./tree.js";

const PEN = "M4 16l1-4 8-8 3 3-8 8z";
const BIN = "M4 6h12M8 6V4h4v2M6 6l.7 10h6.600L14 6";
const DAY = 86_400_000;

function when(time) {
  const date = new Date(time);
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - date.getTime()) / DAY) + 1;
  if (days <= 0) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  if (days === 1) return "Yesterday";
  return date.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}

export class Library {
  /** `actions`: open(conversation), renamed(conversation), removed(conversation), restored(…). */
  constructor(conversations, actions) {
    this.conversations = conversations;
    this.actions = actions;
    this.current = null;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.render());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") {
        event.preventDefault();
        this.list.querySelector(".open")?.focus();
      }
    });
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.prepareRename();
  }

  move(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const item = event.target.closest("li");
    if (!by || !item) return;
    event.preventDefault();
    const next = by > 0 ? item.nextElementSibling : item.previousElementSibling;
    (next?.querySelector(".open") ?? (by < 0 ? this.search : null))?.focus();
  }

  /** A conversation has changed: it is the newest now. */
  touch(conversation) {
    const others = this.conversations.filter((other) => other.id !== conversation.id);
    this.conversations = [conversation, ...others];
    this.render();
  }

  show(conversation) {
    this.current = conversation;
    this.render();
  }

  render() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.conversations.filter((conversation) => matches(conversation, words));
    const focused = this.list.contains(document.activeElement)
      ? document.activeElement.dataset.key : null;
    this.list.replaceChildren(...found.map((conversation) => this.item(conversation)));
    const none = byId("no-conversations");
    none.hidden = found.length > 0;
    none.textContent = this.conversations.length ? "No conversation has these words."
      : "No conversations yet.";
    if (focused) this.list.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  item(conversation) {
    const title = titleOf(conversation);
    const open = make("button", {
      class: "open", type: "button", data: { key: `${conversation.id}:open` },
      onclick: () => this.actions.open(conversation),
    }, make("span", { class: "title", dir: "auto", text: title }),
    make("span", { class: "when", text: [conversation.mode === "prompt" ? "Prompt" : null,
      when(conversation.changed)].filter(Boolean).join(" · ") }));
    if (conversation.id === this.current?.id) open.setAttribute("aria-current", "true");
    const control = (name, label, drawing, onclick) => make("button", {
      class: "icon quiet small", type: "button", "aria-label": `${label} “${title}”`, title: label,
      data: { key: `${conversation.id}:${name}` }, onclick,
    }, icon(drawing));
    return make("li", {}, open,
      control("rename", "Rename", PEN, () => this.rename(conversation)),
      control("delete", "Delete", BIN, () => this.remove(conversation)));
  }

  prepareRename() {
    this.dialog = byId("rename");
    byId("rename-cancel").onclick = () => this.dialog.close();
    this.dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      const title = byId("rename-text").value.trim();
      if (!title) return;
      this.dialog.close();
      Object.assign(this.renaming, { title, named: true });
      this.actions.renamed(this.renaming);
      this.render();
    };
  }

  rename(conversation) {
    this.renaming = conversation;
    byId("rename-text").value = titleOf(conversation);
    this.dialog.showModal();
    byId("rename-text").select();
  }

  /** Deleting asks nothing, since it can be undone until something else is deleted. */
  remove(conversation) {
    const index = this.conversations.indexOf(conversation);
    this.conversations = this.conversations.filter((other) => other !== conversation);
    this.actions.removed(conversation);
    this.render();
    const near = this.list.querySelectorAll(".open")[Math.min(index,
      this.conversations.length - 1)];
    (near ?? byId("new")).focus();
    notice("deleted", `“${titleOf(conversation)}” is deleted.`, { actions: [["Undo", () => {
      unnotice("deleted");
      this.conversations = [...this.conversations.slice(0, index), conversation,
        ...this.conversations.slice(index)];
      this.actions.restored(conversation);
      this.render();
    }]] });
  }
}
