// The two panels beside the conversation. Where there is room they are columns that can be closed;
// on a phone they are drawers above the page, one at a time.

import { byId } from "./dom.js";
import { recall, remember } from "./store.js";

const narrow = matchMedia("(max-width: 899px)");
const veil = byId("veil");
const names = ["library", "settings"];
let drawn = null;

const rest = () => [...document.body.children].filter((element) =>
  !["SCRIPT", "DIALOG", "NOSCRIPT"].includes(element.tagName)
  && element !== veil && element.id !== "said");

function apply() {
  for (const name of names) {
    const open = narrow.matches ? drawn === name : recall(`open-${name}`, roomFor(name));
    document.body.classList.toggle(`with-${name}`, open);
    byId(`open-${name}`).setAttribute("aria-expanded", String(open));
  }
  const above = narrow.matches && drawn !== null;
  veil.hidden = !above;
  // What lies below a drawer cannot be reached, by a finger or by the tab key.
  for (const element of rest()) element.inert = above && element.id !== drawn;
}

const roomFor = (name) => name === "library" || innerWidth >= 1200;

export const isOpen = (name) => document.body.classList.contains(`with-${name}`);

export function openDrawer(name, focus = null) {
  if (narrow.matches) drawn = name;
  else remember(`open-${name}`, true);
  apply();
  (focus ?? byId(name).querySelector(".close"))?.focus();
}

export function closeDrawer(name) {
  if (narrow.matches) drawn = null;
  else remember(`open-${name}`, false);
  apply();
  byId(`open-${name}`).focus();
}

/** Close the drawer above the page, if there is one; whether there was. */
export function closeAbove({ focus = true } = {}) {
  if (!narrow.matches || drawn === null) return false;
  const name = drawn;
  drawn = null;
  apply();
  if (focus) byId(`open-${name}`).focus();
  return true;
}

export function prepareDrawers() {
  for (const name of names) {
    byId(`open-${name}`).onclick = () => (isOpen(name) ? closeDrawer(name) : openDrawer(name));
    byId(name).querySelector(".close").onclick = () => closeDrawer(name);
  }
  veil.onclick = () => closeAbove();
  narrow.addEventListener("change", () => { drawn = null; apply(); });
  apply();
}
