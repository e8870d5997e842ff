// Making elements. Children are nodes or texts, never markup: nothing that a run contains is parsed.

/** An element with attributes, properties (`.value`), listeners (`onclick`) and children. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) node[name.slice(1)] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** A dot in the colour of a run. A policy that forbids style attributes allows this. */
export function dot(colour) {
  const node = element("i", { class: "dot", "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}

/** A table in a card that scrolls sideways; `rows` are lists of cells, or `tr` elements. */
export function tableCard(head, rows, caption) {
  const cells = (row) => row.map((cell) => cell instanceof HTMLTableCellElement ? cell
    : element("td", {}, cell));
  const names = head && element("thead", {}, element("tr", {}, head.map((cell) =>
    cell instanceof HTMLTableCellElement ? cell : element("th", { scope: "col" }, cell))));
  const body = rows.map((row) => Array.isArray(row) ? element("tr", {}, cells(row)) : row);
  const title = caption ? element("caption", { class: "unseen" }, caption) : null;
  return element("div", { class: "card scroll", tabindex: "0", role: "region",
    "aria-label": caption ?? "Table" }, element("table", {}, title, names ?? null,
    element("tbody", {}, body)));
}

export const numberCell = (text) => element("td", { class: "number" }, text);
export const numberHead = (text) => element("th", { class: "number", scope: "col" }, text);

/** A settings file, with its tables, comments and names told apart. */
export function tomlText(text) {
  const lines = text.trimEnd().split("\n").flatMap((line) => {
    const setting = line.match(/^(\s*[\w."'-]+\s*)(=.*)$/);
    if (/^\s*\[/.test(line)) return [element("span", { class: "table" }, line), "\n"];
    if (/^\s*#/.test(line)) return [element("span", { class: "comment" }, line), "\n"];
    if (!setting) return [line, "\n"];
    return [element("span", { class: "setting" }, setting[1]), setting[2], "\n"];
  });
  return element("pre", {}, lines);
}

/** Buttons of which one is pressed. */
export function choice(label, options, current, choose) {
  const buttons = options.map(([value, text]) => element("button", {
    type: "button", onclick: () => { press(value); choose(value); },
  }, text));
  const press = (value) => buttons.forEach((button, index) =>
    button.setAttribute("aria-pressed", String(options[index][0] === value)));
  press(current);
  const node = element("div", { class: "group", role: "group", "aria-label": label },
    element("span", { class: "group-name" }, label), element("span", { class: "switch" }, buttons));
  return { node, press };
}
