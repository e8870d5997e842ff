// The conversation as it is read: messages, answers, what one can do with them, and scrolling.

import { byId, composing, copy, counted, icon, make, say } from "./dom.js";
import { endInWords, failed } from "./generation.js";
import { AnswerText, hideCard, partingOf } from "./tokens.js";
import { parentOf, path, place } from "./tree.js";

const BACK = "M12 5l-5 5 5 5";
const ON = "M8 5l5 5-5 5";
/** Pixels from the end within which the reader is taken to be at the end. */
const NEAR = 48;

const reading = byId("reading");
const newest = byId("newest");
let atEnd = true;

export function prepareReading() {
  reading.addEventListener("scroll", () => {
    atEnd = reading.scrollHeight - reading.scrollTop - reading.clientHeight < NEAR;
    newest.hidden = atEnd;
  }, { passive: true });
  newest.onclick = toEnd;
  // A drawer or the keyboard of a phone changes the room, not what is being read.
  new ResizeObserver(() => follow()).observe(reading);
}

export function toEnd() {
  atEnd = true;
  newest.hidden = true;
  reading.scrollTop = reading.scrollHeight;
}

/** After a change: stay at the end if the reader was there, and do not move otherwise. */
function follow() {
  if (atEnd) reading.scrollTop = reading.scrollHeight;
  else newest.hidden = reading.scrollHeight - reading.clientHeight < NEAR;
}

const pace = (rate) => (rate < 10 ? rate.toFixed(1) : counted(Math.round(rate)));

/** One answer: its text, and a line about it. */
class Lane {
  constructor(answer, view, { spans, label }) {
    this.answer = answer;
    this.view = view;
    this.text = new AnswerText(answer, { spans, probabilities: view.probabilities, label });
    this.meta = make("p", { class: "meta" });
    this.update();
  }

  update() {
    this.text.update();
    const { answer } = this;
    const wait = this.view.waits.get(answer.id);
    const running = this.view.running.has(answer.id);
    const words = running ? this.progress(wait) : [endInWords(answer)];
    if (answer.made) words.push(answer.made === 1 ? "1 token" : `${counted(answer.made)} tokens`);
    if (answer.rate) words.push(`${pace(answer.rate)} tokens/s`);
    this.meta.classList.toggle("bad", !running && failed(answer));
    const parts = [words.join(" · ")];
    if (wait) parts.push(this.button("Try now", wait.now));
    else if (answer.seeds.length && answer.made) parts.push(...this.seeds());
    // Buttons that stay the same must not be replaced under a finger, nor lose the focus.
    const signature = JSON.stringify([wait !== undefined, answer.seeds, answer.made > 0]);
    if (signature === this.signature) this.words.data = parts[0];
    else {
      this.words = document.createTextNode(parts[0]);
      this.meta.replaceChildren(this.words, ...parts.slice(1));
    }
    this.signature = signature;
  }

  progress(wait) {
    if (wait) return [`${wait.message} Trying again in ${wait.seconds} s.`];
    if (this.answer.text) return ["Writing"];
    return [this.view.isLoaded(this.answer.model) ? "Waiting for the first token"
      : `Loading ${this.answer.model}`];
  }

  seeds() {
    const { seeds } = this.answer;
    const seed = seeds.at(-1);
    return [make("button", {
      class: "link", type: "button", text: `${seeds.length > 1 ? "seeds" : "seed"} ${seeds.join(", ")}`,
      title: `Use seed ${seed} from now on`, onclick: () => this.view.actions.useSeed(seed),
    })];
  }

  button(text, onclick) {
    return make("button", { class: "link", type: "button", text, onclick });
  }
}

export class Transcript {
  /** `actions`: edit, regenerate, again, retry, goOn, choose, useLane, useSeed. `isBusy()`: while
   * something is written, nothing else is asked for in the same conversation. */
  constructor(actions, { isLoaded, isBusy }) {
    this.place = byId("transcript");
    this.actions = actions;
    this.isLoaded = isLoaded;
    this.isBusy = isBusy;
    this.running = new Set();
    this.waits = new Map();
    this.editing = null;
    this.edited = null;
    this.probabilities = false;
  }

  /** Build everything anew. The focus stays on the same control, or goes where `focus` says. */
  render(conversation, focus = null) {
    const key = focus ?? this.place.contains(document.activeElement)
      ? focus ?? document.activeElement.dataset.key : null;
    hideCard();
    this.conversation = conversation;
    this.lanes = new Map();
    this.pairs = new Map();
    const nodes = path(conversation);
    const blocks = [];
    nodes.forEach((node, index) => {
      const next = nodes[index + 1];
      if (node.role === "user") {
        // In a text that is continued, the prompt and what follows are one passage.
        const joined = conversation.mode === "prompt" && next?.role === "assistant"
          && this.editing !== node.id;
        if (!joined) blocks.push(this.message(node));
      } else {
        const before = nodes[index - 1];
        const given = conversation.mode === "prompt" && before?.role === "user"
          && this.editing !== before.id ? before : null;
        blocks.push(this.reply(node, given, !next));
      }
    });
    this.place.replaceChildren(...blocks);
    for (const answers of this.pairs.keys()) this.part(answers);
    follow();
    if (key) this.place.querySelector(`[data-key="${key}"]:not(:disabled)`)?.focus();
  }

  /** An answer has grown. */
  update(answer) {
    const lane = this.lanes.get(answer.id);
    // It may belong to a conversation that is not shown, or to another branch.
    if (lane?.answer !== answer) return;
    lane.update();
    for (const answers of this.pairs.keys()) if (answers.includes(answer)) this.part(answers);
    follow();
  }

  message(node) {
    const prompt = this.conversation.mode === "prompt";
    const name = prompt ? "Prompt" : "You";
    const article = make("article", { class: "turn user", "aria-label": name });
    article.append(make("h2", { class: "who", text: name }));
    if (this.editing === node.id) article.append(this.editor(node));
    else {
      article.append(make("div", { class: "text", dir: "auto", text: node.text }),
        make("div", { class: "acts" }, ...this.userActs(node)));
    }
    return article;
  }

  userActs(node) {
    const prompt = this.conversation.mode === "prompt";
    const answered = node.children.length > 0;
    return [
      this.act(node, "edit", prompt ? "Edit the prompt" : "Edit"),
      answered ? null : this.act(node, "retry", prompt ? "Generate" : "Answer"),
      this.branches(node, prompt ? "prompts" : "messages"),
    ];
  }

  editor(node) {
    const field = make("textarea", {
      value: this.edited ?? node.text, dir: "auto",
      rows: Math.min(12, node.text.split("\n").length + 1),
      "aria-label": this.conversation.mode === "prompt" ? "Edit the prompt" : "Edit the message",
      data: { key: `${node.id}:editor` },
    });
    // An answer that ends meanwhile builds the page anew, but not at the cost of what is written.
    field.oninput = () => { this.edited = field.value; };
    const close = () => {
      this.editing = null;
      this.render(this.conversation, `${node.id}:edit`);
    };
    const send = () => {
      if (!field.value.trim() || this.isBusy()) return;
      this.editing = null;
      this.actions.edit(node, field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (composing(event)) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    return make("div", { class: "editor" }, field, make("div", { class: "buttons" },
      make("button", { class: "small", type: "button", text: "Cancel", onclick: close }),
      make("button", {
        class: "small primary", type: "button", text: "Send", disabled: this.isBusy(), onclick: send,
      })));
  }

  reply(node, given, isLast) {
    const { answers } = node;
    const pair = answers.length > 1;
    const prompt = this.conversation.mode === "prompt";
    const names = answers.map((answer) => answer.model || "Assistant");
    const article = make("article", {
      class: `turn assistant${pair ? " pair" : ""}`, "aria-label": names.join(" and "),
    });
    const start = given && make("span", { class: "given", text: given.text });
    if (pair && given) article.append(make("div", { class: "text", dir: "auto" }, start));
    const room = make("div", { class: "lanes" });
    answers.forEach((answer, index) => {
      const lane = new Lane(answer, this, {
        spans: pair, label: `Tokens of ${names[index]}, with their probabilities`,
      });
      this.lanes.set(answer.id, lane);
      const busy = this.running.has(answer.id);
      const text = make("div", { class: "text", dir: "auto", "aria-busy": String(busy) },
        pair ? null : start, lane.text.element);
      room.append(make("section", {
        class: pair && node.lane === index ? "lane used" : "lane",
        "aria-label": pair ? names[index] : undefined,
      }, make("h2", { class: "who", text: names[index] }), text, lane.meta,
      pair ? this.laneActs(node, index) : null));
    });
    article.append(room);
    if (pair) {
      const line = make("p", { class: "parting hint" });
      this.pairs.set(answers, line);
      article.append(line);
    }
    article.append(make("div", { class: "acts" },
      ...(given ? this.userActs(given) : []), ...this.replyActs(node, isLast),
      this.branches(node, prompt ? "continuations" : "answers")));
    return article;
  }

  laneActs(node, index) {
    const used = node.lane === index;
    const button = make("button", {
      class: "small quiet", type: "button", text: used ? "Kept" : "Keep this one",
      title: "The kept answer is exported, and goes on when nothing is compared",
      data: { key: `${node.id}:lane${index}` },
      onclick: () => this.actions.useLane(node, index),
    });
    button.setAttribute("aria-pressed", String(used));
    return make("div", { class: "acts" }, button, this.copier(node.answers[index]));
  }

  replyActs(node, isLast) {
    const running = node.answers.some((answer) => this.running.has(answer.id));
    const some = node.answers.some((answer) => answer.text);
    if (running) return [];
    const asked = parentOf(this.conversation, node).role === "user";
    return [
      isLast && some ? this.act(node, "goOn", "Continue") : null,
      asked ? this.act(node, some ? "regenerate" : "again", some ? "Regenerate" : "Try again")
        : null,
      node.answers.length === 1 && some ? this.copier(node.answers[0]) : null,
    ];
  }

  copier(answer) {
    const button = make("button", { class: "small quiet", type: "button", text: "Copy" });
    button.onclick = async () => {
      button.textContent = await copy(answer.text) ? "Copied" : "Not copied";
      say(button.textContent);
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    return button;
  }

  act(node, name, text) {
    return make("button", {
      class: "small quiet", type: "button", text, data: { key: `${node.id}:${name}` },
      disabled: name !== "edit" && this.isBusy(),
      onclick: () => {
        if (name !== "edit") {
          this.actions[name](node);
          return;
        }
        this.editing = node.id;
        this.edited = null;
        this.render(this.conversation, `${node.id}:editor`);
      },
    });
  }

  /** ‹ 2/3 › where there is more than one branch. */
  branches(node, what) {
    const [index, count] = place(this.conversation, node);
    if (count < 2) return null;
    const arrow = (by, name, drawing) => make("button", {
      class: "icon quiet small", type: "button", disabled: by < 0 ? index === 1 : index === count,
      "aria-label": `${by < 0 ? "Previous" : "Next"} of ${count} ${what}`,
      data: { key: `${node.id}:${name}` },
      onclick: () => this.actions.choose(node, by),
    }, icon(drawing));
    return make("span", { class: "branches", role: "group", "aria-label": `Branches: ${what}` },
      arrow(-1, "back", BACK), make("span", { class: "count", text: `${index}/${count}` }),
      arrow(1, "on", ON));
  }

  /** Say and mark where two answers part. */
  part(answers) {
    const index = partingOf(answers);
    const line = this.pairs.get(answers);
    const ended = answers.every((answer) => answer.end);
    const known = answers.every((answer) => answer.tokens.length);
    let text = "";
    if (index !== null) {
      text = index === 0 ? "They differ from the first token on."
        : `The same for ${index === 1 ? "1 token" : `${counted(index)} tokens`}; the first that `
          + "differs is marked.";
      for (const answer of answers) this.lanes.get(answer.id)?.text.mark(index);
    } else if (ended && known) text = "Both are the same.";
    if (line.textContent !== text) line.textContent = text;
  }
}

/** What a screen reader is told of an answer that has ended. */
export function spoken(node) {
  return node.answers.map((answer) => {
    const text = answer.text.length > 1500 ? `${answer.text.slice(0, 1500)}…` : answer.text;
    return `${answer.model}: ${text} ${endInWords(answer)}.`.replace("..", ".");
  }).join(" ");
}
