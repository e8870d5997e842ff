// A conversation is a tree. Each edit and each new answer is a branch, and nothing is overwritten.
//
//   conversation  { version, id, title, named, mode, model, system, created, changed, top, nodes }
//   node          { id, parent, role, text | answers + lane, children, chosen }
//   answer        { id, model, text, tokens, seeds, sampling, end, made, rate, context }
//
// `top` is the id of a node without content, above the first messages. A node of the assistant holds
// one answer, or two where models are compared; `lane` is the one that goes on and is exported.

export const VERSION = 1;

/** Not crypto.randomUUID: browsers keep that from pages without TLS. */
export function newId() {
  const numbers = crypto.getRandomValues(new Uint32Array(3));
  return [...numbers].map((number) => number.toString(36).padStart(7, "0")).join("");
}

export function newConversation(mode, system = "") {
  const top = { id: newId(), parent: null, role: "top", children: [], chosen: null };
  const now = Date.now();
  return {
    version: VERSION, id: newId(), title: "", named: false, mode, model: "", system,
    created: now, changed: now, top: top.id, nodes: { [top.id]: top },
  };
}

export function newAnswer(model, sampling) {
  return {
    id: newId(), model, text: "", tokens: [], seeds: [], sampling, end: null, made: 0, rate: null,
    context: null,
  };
}

/** A new node below another one, which then leads to it. */
export function add(conversation, parent, content) {
  const node = { id: newId(), parent: parent.id, children: [], chosen: null, ...content };
  conversation.nodes[node.id] = node;
  parent.children.push(node.id);
  parent.chosen = node.id;
  return node;
}

export const parentOf = (conversation, node) => conversation.nodes[node.parent];

/** The nodes of the active branch, first to last, without the top. */
export function path(conversation) {
  const nodes = [];
  let node = conversation.nodes[conversation.top];
  while (node.chosen) {
    node = conversation.nodes[node.chosen];
    nodes.push(node);
  }
  return nodes;
}

/** The nodes from the first to this one. */
export function pathTo(conversation, node) {
  const nodes = [];
  for (let at = node; at.id !== conversation.top; at = parentOf(conversation, at)) nodes.unshift(at);
  return nodes;
}

export const last = (conversation) => path(conversation).at(-1)
  ?? conversation.nodes[conversation.top];

/** Which branch this is: [place, how many], from 1. */
export function place(conversation, node) {
  const { children } = parentOf(conversation, node);
  return [children.indexOf(node.id) + 1, children.length];
}

/** Go to the branch beside this one; the node there. */
export function turn(conversation, node, by) {
  const parent = parentOf(conversation, node);
  const index = parent.children.indexOf(node.id) + by;
  parent.chosen = parent.children[Math.min(Math.max(index, 0), parent.children.length - 1)];
  return conversation.nodes[parent.chosen];
}

/** What a node says in a lane; a single answer speaks in both. */
export function textOf(node, lane = null) {
  if (node.role === "user") return node.text;
  return (node.answers[lane ?? node.lane] ?? node.answers[0]).text;
}

/** The messages up to a node, in the lane of a comparison. Answers that never came are left out. */
export function messagesTo(conversation, node, lane = null) {
  const messages = conversation.system.trim()
    ? [{ role: "system", content: conversation.system }] : [];
  for (const at of pathTo(conversation, node)) {
    const content = textOf(at, lane);
    if (content) messages.push({ role: at.role, content });
  }
  return messages;
}

/** The text up to a node, in the lane of a comparison. */
export const textTo = (conversation, node, lane = null) => pathTo(conversation, node)
  .map((at) => textOf(at, lane)).join("");

export const answersOf = (conversation) => Object.values(conversation.nodes)
  .flatMap((node) => node.answers ?? []);

/** The name: the user's own, or else how the conversation begins. */
export function titleOf(conversation) {
  if (conversation.named) return conversation.title;
  const first = path(conversation).find((node) => node.role === "user");
  const line = (first?.text ?? "").trim().replace(/\s+/g, " ");
  if (!line) return "New conversation";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** Whether every word of a search is somewhere in it. */
export function matches(conversation, words) {
  if (!words.length) return true;
  const texts = [titleOf(conversation)];
  for (const node of Object.values(conversation.nodes)) {
    if (node.text) texts.push(node.text);
    for (const answer of node.answers ?? []) texts.push(answer.text);
  }
  const all = texts.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

/** Whether a value from storage is a conversation that the page can show. */
export function sound(value) {
  const text = (item) => typeof item === "string";
  if (value?.version !== VERSION || !text(value.id) || !text(value.title) || !text(value.system)
    || !["chat", "prompt"].includes(value.mode) || !value.nodes?.[value.top]) return false;
  for (const [id, node] of Object.entries(value.nodes)) {
    if (node?.id !== id || !Array.isArray(node.children)) return false;
    if (node.chosen !== null && !node.children.includes(node.chosen)) return false;
    if (node.children.some((child) => value.nodes[child]?.parent !== id)) return false;
    if (node.role === "user" ? !text(node.text) : node.role === "assistant" ? !soundAnswers(node)
      : id !== value.top) return false;
    if (id === value.top ? node.parent !== null : !value.nodes[node.parent]) return false;
  }
  return soundlyRooted(value);
}

function soundAnswers(node) {
  return Array.isArray(node.answers) && node.answers.length > 0 && node.answers.length < 3
    && node.answers.every((answer) => typeof answer?.text === "string"
      && typeof answer.model === "string" && Array.isArray(answer.tokens)
      && Array.isArray(answer.seeds))
    && node.lane in node.answers;
}

/** Every node is below the top: no circle, and nothing twice. */
function soundlyRooted(value) {
  const met = new Set();
  const open = [value.top];
  while (open.length) {
    const id = open.pop();
    if (met.has(id)) return false;
    met.add(id);
    open.push(...value.nodes[id].children);
  }
  return met.size === Object.keys(value.nodes).length;
}
