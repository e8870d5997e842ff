// What may be asked of a run that trains: stop, save, validate, another horizon. Each is confirmed.

import { getJson, hasToken } from "./api.js";
import { byId, notice } from "./dom.js";
import { element } from "./elements.js";

const ACTIONS = {
  save: ["Save now", "The run saves a checkpoint after its current step and goes on."],
  validate: ["Validate now", "The run measures its validation loss after its current step and goes on."],
  until: ["Change the horizon …", "The run trains until then. Its learning rate follows the new horizon."],
  stop: ["Stop …", "The run saves a checkpoint after its current step and ends. It can be resumed."],
};

/** The buttons; without a token they say how to get one. `current()` is the run as it is now. */
export function actionBar(row, current) {
  if (!hasToken()) {
    return element("p", { class: "note" }, "Actions need a token: open the address that the server "
      + "printed when it started, the one that ends with #token=….");
  }
  const buttons = Object.entries(ACTIONS).map(([action, [label]]) => element("button", {
    type: "button", class: action === "stop" ? "danger" : null,
    onclick: () => confirmAction(current() ?? row, action),
  }, label));
  return element("div", { class: "actions", role: "group", "aria-label": "Actions" }, buttons);
}

function confirmAction(row, action) {
  const dialog = byId("confirm"), [label, text] = ACTIONS[action];
  const title = label.replace(" …", "");
  const until = action === "until" ? element("input", { id: "until", required: true, autocomplete: "off",
    placeholder: "20k steps", value: row.steps ? `${row.steps} steps` : "" }) : null;
  const wrong = element("p", { class: "wrong", role: "alert", hidden: true });
  const send = element("button", { class: "primary", type: "submit" }, title);
  const submit = async (event) => {
    event.preventDefault();
    send.disabled = true;
    try {
      const body = until ? { action, until: until.value.trim() } : { action };
      await getJson(`api/run/${row.id}/action`, { body });
      dialog.close();
      notice("action", `${row.name} was asked: ${title.toLowerCase()}. Its log says when it is done.`);
    } catch (error) {
      wrong.textContent = error.message;
      wrong.hidden = false;
      send.disabled = false;
    }
  };
  const form = element("form", { onsubmit: submit },
    element("h2", { id: "confirm-title" }, `${title}: ${row.name}`), element("p", {}, text),
    until ? element("label", {}, "Train until", until) : null, wrong,
    element("div", { class: "answers" },
      element("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), send));
  dialog.replaceChildren(form);
  dialog.showModal();
  (until ?? send).focus();
}
