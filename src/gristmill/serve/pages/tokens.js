// The text of an answer while it grows; with its tokens where someone wants to see them.

import { byId, make } from "./dom.js";

/** Bytes that are no text by themselves: U+FFFD in chats, `bytes:\xe2\x80` in completions. */
const BROKEN = /\ufffd|^bytes:(\\x[0-9a-f]{2})+$/;
/** Below each of these, a token is shaded more. Small models are rarely sure of anything. */
const LEVELS = [0.5, 0.2, 0.05, 0.01];
/** Spans and what they show: a list of tokens, since several can make up one character. */
const shown = new WeakMap();

export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 9.95) return `${value.toFixed(0)}%`;
  if (value >= 0.995) return `${value.toFixed(1)}%`;
  return value >= 0.005 ? `${value.toFixed(2)}%` : "<0.01%";
}

/** A token so that its spaces and line ends can be seen. */
function visible(text) {
  if (!text) return "(nothing)";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍")
    .replaceAll(" ", "␣");
}

const named = (text) => (BROKEN.test(text) ? "part of a character" : visible(text));

function level(tokens) {
  if (tokens.some(([, logprob]) => logprob === null)) return "unknown";
  const probability = Math.exp(tokens.reduce((sum, [, logprob]) => sum + logprob, 0));
  return String(LEVELS.filter((bound) => probability < bound).length);
}

/** The text of one answer in the page. It only ever grows, so that selections in it survive. */
export class AnswerText {
  /** `spans`: an element for each token; `probabilities`: shaded, and with a card. */
  constructor(answer, { spans, probabilities, label }) {
    this.answer = answer;
    this.spans = spans || probabilities;
    this.probabilities = probabilities;
    this.element = make("span", { class: probabilities ? "made shaded" : "made" });
    this.tail = document.createTextNode("");
    this.element.append(this.tail);
    this.used = 0;
    this.at = 0;
    this.pending = [];
    this.spanOf = [];
    if (probabilities) {
      this.element.setAttribute("role", "listbox");
      this.element.setAttribute("aria-orientation", "horizontal");
      this.element.setAttribute("aria-label", label);
    }
    this.update();
  }

  update() {
    if (this.spans) this.align();
    // What belongs to no token yet, or is not split into tokens, is at the end.
    const rest = this.answer.text.slice(this.at);
    if (rest.startsWith(this.tail.data)) this.tail.appendData(rest.slice(this.tail.length));
    else this.tail.data = rest;
  }

  /** Find each token in the text. What a token says of itself is not always what the text says:
   * half a character has no text of its own, and a space at the start may be dropped. */
  align() {
    const { text, tokens } = this.answer;
    for (; this.used < tokens.length; this.used += 1) {
      const word = tokens[this.used][0];
      if (word && !BROKEN.test(word)) {
        const found = text.indexOf(word, this.at);
        const near = this.pending.length ? found <= this.at + 8 * this.pending.length
          : found === this.at;
        if (found >= 0 && near) {
          this.flush(found);
          this.span([this.used], found + word.length);
          continue;
        }
        // Its text may still be on the way.
        if (!this.answer.end && text.length < this.at + word.length) return;
      }
      this.pending.push(this.used);
    }
    if (this.answer.end) this.flush(text.length);
  }

  /** The tokens without a text of their own share what lies before the next one. */
  flush(until) {
    if (this.pending.length && until > this.at) this.span(this.pending, until);
    if (until > this.at || this.answer.end) this.pending = [];
  }

  span(indices, until) {
    const tokens = indices.map((index) => this.answer.tokens[index]);
    const text = this.answer.text.slice(this.at, until);
    const span = make("span", { class: "token", text });
    if (this.probabilities) {
      span.dataset.level = level(tokens);
      span.tabIndex = this.at ? -1 : 0;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      const chance = tokens.some((token) => token[1] === null) ? "unknown"
        : tokens.map((token) => percent(token[1])).join(" and ");
      span.setAttribute("aria-label", `${visible(text)}: ${chance}`);
      shown.set(span, tokens);
    }
    for (const index of indices) this.spanOf[index] = span;
    this.tail.data = "";
    this.tail.before(span);
    this.at = until;
  }

  /** Mark a token as the first that differs from the other answer. */
  mark(index) {
    const span = this.spanOf[index];
    if (!span || span.classList.contains("differs")) return;
    span.classList.add("differs");
    span.title = "The first token that differs";
  }
}

/** Where two answers part: the index of the first token that differs; null if none does so far. */
export function partingOf([one, other]) {
  const shorter = Math.min(one.tokens.length, other.tokens.length);
  for (let index = 0; index < shorter; index += 1) {
    if (one.tokens[index][0] !== other.tokens[index][0]) return index;
  }
  const ended = one.end && other.end && one.tokens.length !== other.tokens.length;
  return ended ? shorter : null;
}

const card = byId("token-card");
let owner = null;

function showCard(span) {
  const tokens = shown.get(span);
  if (!tokens) return;
  if (owner) hideCard();
  owner = span;
  card.replaceChildren(...tokens.flatMap((token) => cardOf(token, tokens.length > 1)));
  card.hidden = false;
  span.setAttribute("aria-describedby", card.id);
  // A token that is split by the end of a line has two boxes; its space may be all of the first.
  const box = [...span.getClientRects()].sort((one, other) => other.width - one.width)[0]
    ?? span.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - card.offsetWidth - 8);
  const below = box.bottom + 6;
  const fits = below + card.offsetHeight < innerHeight - 8;
  card.style.left = `${left}px`;
  card.style.top = `${fits ? below : Math.max(8, box.top - card.offsetHeight - 6)}px`;
}

export function hideCard() {
  if (!owner) return false;
  owner.removeAttribute("aria-describedby");
  owner = null;
  card.hidden = true;
  return true;
}

function cardOf([text, logprob, alternatives], part) {
  const name = part && !text ? "part of a character" : named(text);
  const head = make("p", { class: "card-head" }, make("code", { text: name }),
    make("strong", { text: logprob === null ? "not known" : percent(logprob) }));
  if (!alternatives) {
    return [head, make("p", { class: "hint", text: "Alternatives come with answers made while "
      + "probabilities are switched on." })];
  }
  // Parts of characters look the same, so it is the probability that tells which one was chosen.
  const chosen = alternatives.findIndex(([other, chance]) =>
    other === text && Math.abs(chance - logprob) < 1e-6);
  const all = chosen < 0 ? [...alternatives, [text, logprob]] : alternatives;
  const rows = all.map(([other, chance], index) => {
    const bar = make("span", { class: "bar" });
    bar.style.width = `${(100 * Math.exp(chance)).toFixed(1)}%`;
    const mine = index === (chosen < 0 ? all.length - 1 : chosen);
    return make("li", { class: mine ? "mine" : "" }, make("code", { text: named(other) }),
      make("span", { class: "bar-room", "aria-hidden": "true" }, bar),
      make("span", { class: "share", text: percent(chance) }),
      mine ? make("span", { class: "unseen", text: "(chosen)" }) : null);
  });
  return [head, make("ol", {}, ...rows)];
}

/** Show the card of a token under the pointer, with the focus, or tapped. */
export function offerCards(place) {
  const tokenAt = (event) => event.target.closest?.(".shaded > .token") ?? null;
  place.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    const span = tokenAt(event);
    if (span) showCard(span);
    else if (owner && owner !== document.activeElement) hideCard();
  });
  place.addEventListener("pointerleave", hideCard);
  place.addEventListener("focusin", (event) => {
    const span = tokenAt(event);
    if (span) showCard(span);
    else hideCard();
  });
  place.addEventListener("focusout", hideCard);
  place.addEventListener("click", (event) => {
    const span = tokenAt(event);
    // A click at the end of selecting text is not meant for the token.
    if (span && getSelection().isCollapsed) {
      moveTo(span);
      showCard(span);
    }
  });
  place.addEventListener("scroll", hideCard, { passive: true });
  place.addEventListener("keydown", (event) => {
    const span = tokenAt(event);
    if (!span || event.altKey || event.ctrlKey || event.metaKey) return;
    const next = {
      ArrowRight: span.nextElementSibling, ArrowLeft: span.previousElementSibling,
      Home: span.parentElement.firstElementChild, End: span.parentElement.lastElementChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    moveTo(next);
  });
}

/** Of all tokens of an answer, one is reached by the tab key: the last that had the focus. */
function moveTo(span) {
  for (const other of span.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  span.tabIndex = 0;
  span.focus({ preventScroll: false });
}
