// Making elements. Text becomes text: nothing here, or anywhere in these pages, parses markup.

const NAMESPACE = "http://www.w3.org/2000/svg";

/** An element with properties, attributes, listeners (`onclick`) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A small drawing from one path. */
export function icon(path) {
  const drawing = document.createElementNS(NAMESPACE, "svg");
  drawing.setAttribute("viewBox", "0 0 20 20");
  drawing.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(NAMESPACE, "path");
  line.setAttribute("d", path);
  drawing.append(line);
  return drawing;
}

export const byId = (id) => document.getElementById(id);

/** Say something to screen readers, once. */
export function say(text) {
  const place = byId("said");
  place.textContent = "";
  // The same words again are only said if the text changes in between.
  requestAnimationFrame(() => { place.textContent = text; });
}

/** Show a message above the conversation. One of a kind replaces the last of that kind. */
export function notice(kind, text, { bad = false, actions = [] } = {}) {
  unnotice(kind);
  const close = make("button", {
    class: "small quiet", type: "button", text: "Dismiss", onclick: () => unnotice(kind),
  });
  const buttons = actions.map(([label, act]) => make("button", {
    class: "small", type: "button", text: label, onclick: act,
  }));
  const box = make("div", {
    class: bad ? "notice bad" : "notice", role: bad ? "alert" : "status", data: { kind },
  }, make("p", { text }), ...buttons, close);
  byId("notices").append(box);
}

export function unnotice(kind) {
  for (const box of [...byId("notices").children]) if (box.dataset.kind === kind) box.remove();
}

/** A whole number as people write it: 1,024. */
export const counted = (number) => number.toLocaleString("en");

/** Calls come often; only the last of a burst acts. */
export function settled(act, wait) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), wait);
  };
}

/** Whether a key belongs to writing a character, as in Japanese. Safari says so by the old code. */
export const composing = (event) => event.isComposing || event.keyCode === 229;

/** Text to the clipboard; true if it got there. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS, browsers offer the clipboard to this machine's own pages alone. The old way
    // still works there.
    const field = make("textarea", { value: text, class: "unseen", readOnly: true });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
