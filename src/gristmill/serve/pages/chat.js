// The chat page: what happens when. The parts it joins do not know each other.

import { prepareColours } from "./colours.js";
import { ContextMeter } from "./context.js";
import { byId, composing, counted, notice, say, settled, unnotice } from "./dom.js";
import { closeAbove, isOpen, openDrawer, prepareDrawers } from "./drawers.js";
import { grow, requestOf } from "./generation.js";
import { Library } from "./library.js";
import { Models } from "./models.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { hideCard, offerCards } from "./tokens.js";
import { offerTransfer } from "./transfer.js";
import { Transcript, prepareReading, spoken, toEnd } from "./transcript.js";
import * as tree from "./tree.js";

/** Milliseconds between two savings of an answer that grows. */
const SAVE_EVERY = 1000;

const draft = byId("draft");
const send = byId("send");
const stop = byId("stop");
const system = byId("system");

/** What generates: conversation id -> { controller, node }. */
const running = new Map();
let conversation = tree.newConversation("chat");
/** Ids of conversations that are deleted, whatever may still be on its way for them. */
const deleted = new Set();
let library;

const context = new ContextMeter(() => ({
  about: models.about(models.first), online: models.online, running: running.get(conversation.id),
  conversation, draft: draft.value,
}));

/** Whether something was sent before it was known which models there are. */
let early = false;

const models = new Models(() => {
  refresh();
  if (!early || !models.first) return;
  early = false;
  submit();
});
const transcript = new Transcript({
  edit: (node, text) => branch(node, text),
  regenerate: (node) => ask(tree.parentOf(conversation, node)),
  retry: (node) => ask(node),
  again: (node) => run(node),
  goOn: (node) => run(node, true),
  choose: (node, by) => choose(node, by),
  useLane: (node, lane) => {
    node.lane = lane;
    changed();
  },
  useSeed: (seed) => {
    settings.fixSeed(seed);
    notice("seed", `Seed ${seed} is used from now on.`);
  },
}, {
  isLoaded: (id) => models.about(id)?.loaded !== false,
  isBusy: () => running.has(conversation.id),
});

// ---- Showing -------------------------------------------------------------------------------

/** Bring everything but the transcript in line with what is chosen. */
function refresh() {
  const { mode } = conversation;
  const about = models.about(models.first);
  const busy = running.has(conversation.id);
  const chat = mode === "chat";
  byId("mode-chat").setAttribute("aria-pressed", String(chat));
  byId("mode-prompt").setAttribute("aria-pressed", String(!chat));
  document.body.classList.toggle("prompting", !chat);
  byId("system-field").hidden = !chat;
  const continues = !chat && tree.path(conversation).length > 0;
  const label = chat ? "Message" : continues ? "Text to add" : "Prompt";
  byId("draft-label").textContent = label;
  draft.placeholder = chat ? "Message" : continues ? "Add text, or send nothing to go on"
    : "A text for the model to continue";
  send.textContent = chat ? "Send" : "Generate";
  send.hidden = busy;
  stop.hidden = !busy;
  const mute = chat ? models.answering.filter((id) => models.about(id)?.chat === false) : [];
  if (mute.length) {
    notice("template", `${mute.join(" and ")} ${mute.length > 1 ? "have" : "has"} no chat template: `
      + "it was not trained on conversations.",
    { actions: [["Use Prompt", () => setMode("prompt")]] });
  } else unnotice("template");
  send.disabled = !models.first || mute.length > 0;
  welcome(about);
  context.show();
  context.count();
}

function welcome(about) {
  const empty = tree.path(conversation).length === 0;
  const place = byId("welcome");
  place.hidden = !empty || !about;
  if (place.hidden) return;
  const [title, facts] = place.children;
  title.textContent = conversation.mode === "chat" ? `Talk to ${about.id}`
    : `Let ${about.id} continue a text`;
  facts.textContent = [
    about.parameters ? `${counted(about.parameters)} parameters` : null,
    about.step !== null && about.step !== undefined ? `step ${counted(about.step)}` : null,
    `a context of ${counted(about.context)} tokens`,
  ].filter(Boolean).join(" · ");
}

function render(focus = null) {
  transcript.render(conversation, focus);
  refresh();
}

/** The conversation shown has changed: keep it, show it. */
function changed(focus = null) {
  conversation.changed = Date.now();
  keep(conversation);
  library.touch(conversation);
  render(focus);
}

async function keep(which) {
  if (deleted.has(which.id)) return;
  const problem = await store.save(which);
  if (problem) notice("storage", problem, { bad: true });
  else unnotice("storage");
}

// ---- Asking --------------------------------------------------------------------------------

/** Add what is written, and have it answered. */
function submit() {
  early = !models.first;
  if (running.has(conversation.id) || send.disabled) return;
  const chat = conversation.mode === "chat";
  const text = draft.value;
  let end = tree.last(conversation);
  if (chat ? !text.trim() : !text) {
    if (!chat && end.role === "assistant") run(end, true);
    else if (!chat && end.role === "user") ask(end);
    return;
  }
  if (!ready()) return;
  // After a question that got no answer, the next one stands beside it, not below.
  if (chat && end.role === "assistant" && !tree.textOf(end)) end = tree.parentOf(conversation, end);
  if (chat && end.role === "user") end = tree.parentOf(conversation, end);
  draft.value = "";
  grown();
  toEnd();
  ask(tree.add(conversation, end, { role: "user", text }));
}

function branch(node, text) {
  if (!ready()) {
    render();
    return;
  }
  const parent = tree.parentOf(conversation, node);
  ask(tree.add(conversation, parent, { role: "user", text }));
  draft.focus();
}

function ready() {
  if (settings.settingsAreValid()) return true;
  if (!isOpen("settings")) openDrawer("settings");
  settings.showInvalid();
  return false;
}

/** A new answer to a message, beside those there are. */
function ask(node) {
  if (running.has(conversation.id) || send.disabled || !ready()) return;
  const sampling = settings.sampling();
  const answers = models.answering.map((id) => tree.newAnswer(id, sampling));
  run(tree.add(conversation, node, { role: "assistant", answers, lane: 0 }));
}

/** Let the answers of a node grow: from nothing, or from where they stopped. */
async function run(node, goesOn = false) {
  if (running.has(conversation.id) || !ready()) return;
  const mine = conversation;
  const controller = new AbortController();
  const now = { controller, node, before: node.answers[0].made };
  const seed = settings.drawSeed();
  const sampling = settings.sampling();
  running.set(mine.id, now);
  const growing = node.answers.map((answer, lane) => {
    const whole = node.answers.length > 1 ? lane : null;
    // Of two, one may have failed before its first word: it begins, while the other goes on.
    const more = goesOn && answer.text !== "";
    const end = more ? node : tree.parentOf(mine, node);
    const request = requestOf({
      mode: mine.mode, model: answer.model || models.first, sampling, seed, goesOn: more,
      given: mine.mode === "prompt" ? tree.textTo(mine, end, whole)
        : tree.messagesTo(mine, end, whole),
      alternatives: transcript.probabilities,
    });
    answer.model ||= models.first;
    Object.assign(answer, { sampling, context: null });
    // A try that brought nothing leaves no trace.
    if (!answer.text) answer.seeds = [];
    answer.seeds.push(seed);
    transcript.running.add(answer.id);
    return [answer, request];
  });
  changed();
  announceStart(mine);
  await Promise.all(growing.map(([answer, request]) => growOne(mine, answer, request, controller)));
  running.delete(mine.id);
  finish(mine, node);
}

function announceStart(mine) {
  if (mine === conversation && document.activeElement === document.body) draft.focus();
}

async function growOne(mine, answer, request, controller) {
  let saving = 0;
  let drawn = false;
  const draw = () => {
    drawn = false;
    if (mine !== conversation) return;
    transcript.update(answer);
    context.show();
  };
  await grow(answer, request, controller.signal, {
    changed() {
      // However many tokens come, the page is drawn once for each frame of the screen.
      if (!drawn) requestAnimationFrame(draw);
      drawn = true;
      saving ||= setTimeout(() => {
        saving = 0;
        keep(mine);
      }, SAVE_EVERY);
    },
    waiting(seconds, message, now) {
      if (seconds && !transcript.waits.has(answer.id)) {
        say(`${message} Trying again in ${seconds} seconds.`);
      }
      if (seconds) transcript.waits.set(answer.id, { seconds, message, now });
      else transcript.waits.delete(answer.id);
      draw();
    },
    askKey: () => models.askKey(),
  });
  clearTimeout(saving);
  transcript.running.delete(answer.id);
  const about = models.about(answer.model);
  if (about && answer.text) about.loaded = true;
  if (answer.end.reason === "offline") models.lost();
  // The checkpoint may be gone: runs keep the newest ones alone.
  if (answer.end.reason === "refused") models.load();
  draw();
}

function finish(mine, node) {
  if (deleted.has(mine.id)) return;
  mine.changed = Date.now();
  keep(mine);
  library.touch(mine);
  if (mine !== conversation) return;
  context.settle(node.answers[0].context);
  const focused = document.activeElement;
  render();
  // The Stop button is gone, and the focus must not go with it.
  if (focused === stop || document.activeElement === document.body) draft.focus();
  say(spoken(node));
}

function halt() {
  const now = running.get(conversation.id);
  now?.controller.abort();
  return now !== undefined;
}

function choose(node, by) {
  const to = tree.turn(conversation, node, by);
  const [index, count] = tree.place(conversation, to);
  const end = by < 0 ? index === 1 : index === count;
  const name = (by < 0) === end ? "on" : "back";
  changed(`${to.id}:${by > 0 && !end ? "on" : name}`);
  say(`${index} of ${count}`);
}

// ---- Conversations -------------------------------------------------------------------------

async function open(which, { focus = true } = {}) {
  conversation = which;
  transcript.editing = null;
  system.value = which.system;
  models.choose(tree.path(which).at(-1)?.answers?.[0].model);
  library.show(which);
  context.settle(0);
  store.remember("conversation", which.id);
  closeAbove({ focus: false });
  await store.loadTokens(which);
  if (which !== conversation) return;
  render();
  toEnd();
  if (focus) draft.focus();
}

function start(mode = conversation.mode) {
  // An empty one is as good as new.
  if (tree.path(conversation).length) {
    open(tree.newConversation(mode, conversation.system));
    return;
  }
  conversation.mode = mode;
  closeAbove({ focus: false });
  render();
  draft.focus();
}

function setMode(mode) {
  store.remember("mode", mode);
  if (mode !== conversation.mode) start(mode);
}

function prepareLibrary(conversations) {
  library = new Library(conversations, {
    open: (which) => open(which),
    renamed(which) { keep(which); },
    removed(which) {
      deleted.add(which.id);
      running.get(which.id)?.controller.abort();
      store.remove(which);
      if (which === conversation) open(tree.newConversation(which.mode), { focus: false });
    },
    restored(which) {
      deleted.delete(which.id);
      keep(which);
      open(which);
    },
  });
  store.watch((which) => {
    // What is generating here is newer than what another tab has.
    if (running.has(which.id)) return;
    const shown = which.id === conversation.id && !transcript.editing;
    const index = library.conversations.findIndex((other) => other.id === which.id);
    if (index < 0) library.conversations.unshift(which);
    else if (shown || which.id !== conversation.id) library.conversations[index] = which;
    if (shown) {
      conversation = which;
      library.current = which;
      store.loadTokens(which).then(() => { if (which === conversation) render(); });
    }
    library.render();
  }, (id) => {
    library.conversations = library.conversations.filter((other) => other.id !== id);
    library.render();
  });
  offerTransfer({
    current: () => conversation,
    all: () => library.conversations,
    async receive(received) {
      for (const which of received.toReversed()) {
        library.conversations = [which, ...library.conversations];
        await keep(which);
      }
      if (received.length) open(received[0], { focus: false });
    },
  });
}

// ---- Controls ------------------------------------------------------------------------------

/** The field is as high as its text, up to a limit in the style sheet. */
function grown() {
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight + 2}px`;
  store.rememberDraft(draft.value);
}

function onKey(event) {
  if (composing(event)) return;
  const mod = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  const modal = document.querySelector("dialog[open]");
  if (mod && key === "/" && !modal) byId("help").showModal();
  else if (modal) return;
  else if (event.key === "Escape") {
    if (hideCard() || closeAbove() || halt()) event.preventDefault();
    return;
  } else if (mod && event.shiftKey && key === "o") start();
  else if (mod && !event.shiftKey && key === "k") {
    openDrawer("library", byId("search"));
    byId("search").select();
  } else return;
  event.preventDefault();
}

function prepareProbabilities() {
  const button = byId("probabilities");
  const show = () => {
    button.setAttribute("aria-pressed", String(transcript.probabilities));
    document.body.classList.toggle("probable", transcript.probabilities);
  };
  transcript.probabilities = store.recall("probabilities", false) === true;
  button.onclick = () => {
    transcript.probabilities = !transcript.probabilities;
    store.remember("probabilities", transcript.probabilities);
    show();
    render();
  };
  show();
}

function prepareControls() {
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    submit();
  };
  draft.addEventListener("input", () => {
    early = false;
    grown();
    context.count();
  });
  draft.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || composing(event)) return;
    event.preventDefault();
    submit();
  });
  stop.onclick = () => halt();
  byId("new").onclick = () => start();
  byId("mode-chat").onclick = () => setMode("chat");
  byId("mode-prompt").onclick = () => setMode("prompt");
  const keepSystem = settled((which) => { if (tree.path(which).length) keep(which); }, 300);
  system.addEventListener("input", () => {
    conversation.system = system.value;
    keepSystem(conversation);
    context.count();
  });
  const help = byId("help");
  byId("open-help").onclick = () => help.showModal();
  help.querySelector(".close").onclick = () => help.close();
  const mac = /Mac|iP(hone|ad)/.test(navigator.platform);
  for (const place of document.querySelectorAll("[data-mod]")) place.textContent = mac ? "⌘" : "Ctrl";
  document.addEventListener("keydown", onKey);
  // Nothing that the page has is lost by leaving it; what grows is kept as far as it came.
  addEventListener("pagehide", () => {
    for (const which of library.conversations) {
      if (which === conversation || running.has(which.id)) store.rescue(which);
    }
  });
}

async function main() {
  prepareColours(byId("theme"));
  settings.prepareSettings();
  prepareDrawers();
  prepareReading();
  prepareProbabilities();
  prepareControls();
  draft.value = store.recallDraft();
  grown();
  offerCards(byId("reading"));
  const { conversations, broken, kept } = await store.load();
  prepareLibrary(conversations);
  if (!kept) notice("storage", store.NOTHING_KEPT, { bad: true });
  if (broken) {
    notice("broken", `${broken === 1 ? "1 conversation" : `${broken} conversations`} in the `
      + "browser's storage could not be read, and stay there untouched.", { bad: true });
  }
  const mode = store.recall("mode", "chat") === "prompt" ? "prompt" : "chat";
  const lastOpen = store.recall("conversation", null);
  await open(conversations.find((which) => which.id === lastOpen) ?? tree.newConversation(mode));
  await models.load();
  // A model without a chat template can still continue a text.
  if (models.about(models.first)?.chat === false && !tree.path(conversation).length) {
    conversation.mode = "prompt";
    render();
  }
}

main();
