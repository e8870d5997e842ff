// Conversations in the browser's own database. The page works without it too: where storage is
// forbidden, full or broken, conversations live as long as the page, and it says so.

import { answersOf, sound } from "./tree.js";

let database = null;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("gristmill") : null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const ended = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
});

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("gristmill", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      // Probabilities are most of the volume, and are read when a conversation is opened.
      request.result.createObjectStore("tokens");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    // Another tab holds an older version open. Waiting for it could take forever.
    request.onblocked = () => reject(new Error("blocked"));
  });
}

/** What is said where nothing can be kept. */
export const NOTHING_KEPT = "This browser keeps nothing for this page: conversations last until it "
  + "is closed. Export what matters.";
/** Begins the names of conversations that were left in the middle of an answer. */
const RESCUE = "gristmill.rescue.";
/** Begins the names of marks: this one is being deleted. */
const DELETED = "gristmill.deleted.";

/** All conversations, newest first, and how many could not be read. Those stay where they are. */
export async function load() {
  try {
    database = await open();
    database.onversionchange = () => { database.close(); database = null; };
    const values = await done(database.transaction("conversations").objectStore("conversations")
      .getAll());
    const all = values.filter(sound);
    const broken = values.length - all.length;
    for (const rescued of takeRescued()) {
      const index = all.findIndex((other) => other.id === rescued.id);
      if (index >= 0 && all[index].changed > rescued.changed) continue;
      all.splice(index < 0 ? all.length : index, 1, rescued);
      await save(rescued);
    }
    const gone = new Set(namesWith(DELETED).map((name) => name.slice(DELETED.length)));
    for (const conversation of all) if (gone.has(conversation.id)) await remove(conversation);
    const conversations = all.filter((conversation) => !gone.has(conversation.id));
    conversations.sort((one, other) => other.changed - one.changed);
    return { conversations, broken, kept: true };
  } catch {
    return { conversations: [], broken: 0, kept: false };
  }
}

/** A conversation without what is kept apart. */
const bareOf = (conversation) => JSON.stringify(conversation, (name, value) =>
  (name === "tokens" ? [] : value));

/** Keep a conversation at once, while the page is being left: the database is too slow then. */
export function rescue(conversation) {
  try {
    localStorage.setItem(RESCUE + conversation.id, bareOf(conversation));
  } catch {
    // What was kept last is in the database.
  }
}

function namesWith(start) {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(start));
  } catch {
    return [];
  }
}

function takeRescued() {
  const found = [];
  try {
    for (const name of namesWith(RESCUE)) {
      const text = localStorage.getItem(name);
      localStorage.removeItem(name);
      const value = JSON.parse(text);
      if (sound(value)) found.push(value);
    }
  } catch {
    // As above.
  }
  return found;
}

/** Keep a conversation; a sentence why not, or null. */
export async function save(conversation) {
  if (!database) return NOTHING_KEPT;
  const tokens = [];
  // Tokens with a probability alone can be had again from the text; those with alternatives, and
  // those that a comparison marks, cannot.
  for (const node of Object.values(conversation.nodes)) {
    for (const answer of node.answers ?? []) {
      const worth = node.answers.length > 1 || answer.tokens.some((token) => token[2]);
      if (answer.tokens.length && worth) tokens.push([answer.id, answer.tokens]);
    }
  }
  const bare = JSON.parse(bareOf(conversation));
  try {
    const transaction = database.transaction(["conversations", "tokens"], "readwrite");
    transaction.objectStore("conversations").put(bare);
    for (const [id, value] of tokens) transaction.objectStore("tokens").put(value, id);
    await ended(transaction);
  } catch (error) {
    return error?.name === "QuotaExceededError"
      ? "The browser's storage is full: the newest changes are not kept. Export or delete some "
        + "conversations."
      : "The browser could not keep the newest changes. Export what matters.";
  }
  channel?.postMessage({ saved: conversation.id });
  return null;
}

/** Put the tokens of its answers back into a conversation. */
export async function loadTokens(conversation) {
  if (!database) return;
  try {
    const tokens = database.transaction("tokens").objectStore("tokens");
    await Promise.all(answersOf(conversation).filter((answer) => !answer.tokens.length)
      .map(async (answer) => {
        const value = await done(tokens.get(answer.id));
        if (Array.isArray(value) && !answer.tokens.length) answer.tokens = value;
      }));
  } catch {
    // The text is there, and probabilities are not worth an alarm.
  }
}

export async function remove(conversation) {
  if (!database) return;
  const mark = DELETED + conversation.id;
  try {
    // Who deletes and leaves at once is faster than the database.
    localStorage.setItem(mark, "");
  } catch {
    // Then it may be there again, and can be deleted once more.
  }
  try {
    const transaction = database.transaction(["conversations", "tokens"], "readwrite");
    transaction.objectStore("conversations").delete(conversation.id);
    for (const answer of answersOf(conversation)) {
      transaction.objectStore("tokens").delete(answer.id);
    }
    await ended(transaction);
    channel?.postMessage({ removed: conversation.id });
    localStorage.removeItem(mark);
  } catch {
    // It is there again after a reload, and can be deleted then.
  }
}

/** One conversation as it is kept; null if it is not. */
async function fetchOne(id) {
  try {
    const value = await done(database.transaction("conversations").objectStore("conversations")
      .get(id));
    return sound(value) ? value : null;
  } catch {
    return null;
  }
}

/** Tell of changes that another tab made. */
export function watch(onSaved, onRemoved) {
  if (!channel) return;
  channel.onmessage = async ({ data }) => {
    if (data.removed) onRemoved(data.removed);
    const conversation = data.saved && await fetchOne(data.saved);
    if (conversation) onSaved(conversation);
  };
}

/** What is written and not sent, of this tab. */
export function rememberDraft(text) {
  try {
    sessionStorage.setItem("gristmill.draft", text);
  } catch {
    // It lasts as long as the page.
  }
}

export function recallDraft() {
  try {
    return sessionStorage.getItem("gristmill.draft") ?? "";
  } catch {
    return "";
  }
}

/** A small setting; settings are worth no complaint if they cannot be kept. */
export function remember(name, value) {
  try {
    localStorage.setItem(`gristmill.${name}`, JSON.stringify(value));
  } catch {
    // They last as long as the page.
  }
}

export function recall(name, otherwise) {
  try {
    const text = localStorage.getItem(`gristmill.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}
