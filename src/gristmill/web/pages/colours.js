// The switch between light, dark and what the system says, for all pages.

import { say } from "./dom.js";

/** A button that goes from one to the next; what it has chosen is applied by theme.js. */
export function prepareColours(button) {
  const root = document.documentElement;
  const kinds = ["system", "light", "dark"];
  const show = () => {
    const kind = root.dataset.theme ?? "system";
    const text = kind === "system" ? "Colours: as the system" : `Colours: ${kind}`;
    button.setAttribute("aria-label", text);
    button.title = text;
  };
  button.onclick = () => {
    const next = kinds[(kinds.indexOf(root.dataset.theme ?? "system") + 1) % kinds.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("gristmill.theme", next);
    } catch {
      // The choice lasts as long as the page.
    }
    show();
    say(button.title);
  };
  show();
}
