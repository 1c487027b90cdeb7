// Dialogs: the key, the keyboard, code to copy.

import { el, button } from "./dom.js";

function openDialog(title, ...children) {
  const close = button("Close", () => dialog.close(), { class: "quiet" });
  const dialog = el(
    "dialog",
    { "aria-label": title },
    el("h2", {}, title),
    ...children,
    el("div", { class: "dialog-foot" }, close),
  );
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Ask for the server's key; null if the person gives none. */
export function askForKey(wasWrong) {
  return new Promise((resolve) => {
    const box = el("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false" });
    const form = el(
      "form",
      {
        method: "dialog",
        onsubmit: (event) => {
          event.preventDefault();
          resolve(box.value.trim() || null);
          dialog.close();
        },
      },
      el(
        "p",
        {},
        wasWrong
          ? "The server did not take that key."
          : "This server wants an API key. It is kept in this tab alone, until you close it.",
      ),
      el("label", { for: "key" }, "API key"),
      box,
      el("button", { type: "submit", class: "primary" }, "Use it"),
    );
    const dialog = openDialog("API key", form);
    dialog.addEventListener("close", () => resolve(null));
    box.focus();
  });
}

const KEYS = [
  ["Ctrl + Enter", "write"],
  ["Esc", "stop writing; leave a field; let go of a token"],
  ["/", "go to the prompt"],
  ["s", "find a setting"],
  ["t", "go to the text; arrow keys move, Enter opens a token"],
  ["↑ ↓ Enter", "in a token: choose another, and write on from it"],
  ["[ and ]", "the run before, the run after"],
  ["w, c", "Write, Compare"],
  ["?", "this list"],
];

const KEYS_KEPT = "unspool-keys";
let keysAreOn = readKeys();

function readKeys() {
  try {
    return localStorage.getItem(KEYS_KEPT) !== "off";
  } catch {
    return true; // a page may have no storage
  }
}

/** Whether single letters act: people who speak their input, or shake, switch them off. */
export function areKeysOn() {
  return keysAreOn;
}

function switchKeys(isOn) {
  keysAreOn = isOn;
  try {
    localStorage.setItem(KEYS_KEPT, isOn ? "on" : "off");
  } catch {
    // then it holds for this page
  }
}

export function showKeys() {
  openDialog(
    "Keyboard",
    el(
      "dl",
      { class: "keys" },
      KEYS.map(([keys, what]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, what)]),
    ),
    el(
      "label",
      { class: "keys-on" },
      el("input", {
        type: "checkbox",
        id: "keys-on",
        checked: areKeysOn(),
        onchange: (event) => switchKeys(event.target.checked),
      }),
      " Keys without Ctrl act, outside of fields",
    ),
  );
}

/** Code in several languages, with buttons that copy it; `say` shows what happened. */
export function showCode(parts, say) {
  openDialog(
    "As code",
    parts.map(([name, code]) =>
      el(
        "section",
        { class: "code-part" },
        el(
          "header",
          {},
          el("h3", {}, name),
          button(
            "Copy",
            async (event) => {
              await copyText(code);
              event.target.textContent = "Copied";
              say(`${name} copied`);
            },
            { class: "quiet", "aria-label": `Copy ${name}` },
          ),
        ),
        el("pre", { tabindex: "0" }, code),
      ),
    ),
  );
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text }); // pages without https have no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
