// Export and import: JSON lines, as `data.kind = "chat"` reads them.

import { byId, make, notice } from "./dom.js";
import { add, newAnswer, newConversation, path, textOf } from "./tree.js";

/** The active branch up to its last answer, as an object for one line; null without an answer. */
function lineOf(conversation) {
  const nodes = path(conversation);
  const end = nodes.findLastIndex((node) => node.role === "assistant" && textOf(node).trim());
  if (end < 0) return null;
  const branch = nodes.slice(0, end + 1);
  if (conversation.mode === "prompt") {
    return {
      prompt: branch.slice(0, -1).map((node) => textOf(node)).join(""),
      completion: textOf(branch.at(-1)),
    };
  }
  const messages = branch.map((node) => ({ role: node.role, content: textOf(node) }))
    .filter((message) => message.content.trim());
  if (conversation.system.trim()) {
    messages.unshift({ role: "system", content: conversation.system });
  }
  return { messages };
}

export function linesOf(conversations) {
  return conversations.map(lineOf).filter(Boolean).map((line) => `${JSON.stringify(line)}\n`);
}

/** Offer the lines as a file; how many there were. */
export function download(conversations, name) {
  const lines = linesOf(conversations);
  if (!lines.length) return 0;
  const address = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  make("a", { href: address, download: name }).click();
  // At once would be before some browsers have begun to read it.
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  return lines.length;
}

/** The conversation that a line holds; null if it holds none. */
function conversationOf(line) {
  let value;
  try {
    value = JSON.parse(line);
  } catch {
    return null;
  }
  const pair = typeof value?.prompt === "string" && typeof value?.completion === "string";
  const messages = pair
    ? [{ role: "user", content: value.prompt }, { role: "assistant", content: value.completion }]
    : Array.isArray(value) ? value : value?.messages;
  if (!Array.isArray(messages) || !messages.length) return null;
  const conversation = newConversation(pair ? "prompt" : "chat");
  let node = conversation.nodes[conversation.top];
  for (const message of messages) {
    if (typeof message?.content !== "string") return null;
    if (message.role === "system") conversation.system = message.content;
    else if (message.role === "user") {
      node = add(conversation, node, { role: "user", text: message.content });
    } else if (message.role === "assistant") {
      const answer = newAnswer("", {});
      answer.text = message.content;
      answer.end = { reason: "imported" };
      node = add(conversation, node, { role: "assistant", answers: [answer], lane: 0 });
    } else return null;
  }
  return node.id === conversation.top ? null : conversation;
}

/** The conversations of a file, and how many lines held none. */
export function readLines(text) {
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  const conversations = lines.map(conversationOf).filter(Boolean);
  return { conversations, bad: lines.length - conversations.length };
}

/** Wire the three buttons to a library. */
export function offerTransfer({ current, all, receive }) {
  const stamp = () => new Date().toISOString().slice(0, 10);
  const exported = (conversations, name) => {
    const count = download(conversations, name);
    const what = count === 1 ? "1 conversation" : `${count} conversations`;
    notice("transfer", count ? `Exported ${what} to ${name}.`
      : "There is nothing to export: only conversations with an answer are.");
  };
  byId("export-one").onclick = () => exported([current()], `conversation-${stamp()}.jsonl`);
  byId("export-all").onclick = () => exported(all(), `conversations-${stamp()}.jsonl`);
  const file = byId("import-file");
  byId("import").onclick = () => file.click();
  file.onchange = async () => {
    if (!file.files.length) return;
    let read = { conversations: [], bad: 1 };
    try {
      read = readLines(await file.files[0].text());
    } catch {
      // A file that cannot be read holds no conversation.
    }
    file.value = "";
    const { conversations, bad } = read;
    await receive(conversations);
    const left = bad ? ` ${bad === 1 ? "1 line is" : `${bad} lines are`} left out: no conversation.` : "";
    notice("transfer", `Imported ${conversations.length === 1 ? "1 conversation"
      : `${conversations.length} conversations`}.${left}`, { bad: !conversations.length });
  };
}
