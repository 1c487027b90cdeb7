// Where the prompt is written: a text to continue, or a chat.

import { el, button, replace } from "./dom.js";

const ROLES = ["system", "user", "assistant"];

export class Composer {
  element = el("div", { class: "composer" });
  onchange = () => {};
  #isChat = false;
  #messages = [{ role: "user", content: "" }];
  #prompt = el("textarea", {
    id: "prompt",
    class: "prompt",
    rows: 4,
    dir: "auto",
    placeholder: "A text to continue",
    "aria-label": "Prompt",
    oninput: () => this.onchange(),
  });
  #chat = el("div", { class: "messages", hidden: true });
  #modes = ["Prompt", "Chat"].map((name, place) =>
    button(name, () => this.#setMode(place === 1), { class: "mode", "aria-pressed": String(place === 0) }),
  );

  constructor() {
    this.element.append(
      el("div", { class: "modes", role: "group", "aria-label": "What is sent" }, this.#modes),
      this.#prompt,
      this.#chat,
    );
    this.#drawChat();
  }

  /** `{prompt}` or `{messages}`; throws an Error if there is nothing. */
  read() {
    if (!this.#isChat) {
      if (this.#prompt.value === "") throw new Error("Write a prompt first.");
      return { prompt: this.#prompt.value };
    }
    const messages = this.#messages.filter((one) => one.content !== "");
    if (!messages.length) throw new Error("Write a message first.");
    return { messages: messages.map((one) => ({ ...one })) };
  }

  write({ prompt, messages }) {
    if (Array.isArray(messages)) this.#messages = messages.map(({ role, content }) => ({ role, content }));
    else this.#prompt.value = prompt ?? "";
    this.#setMode(Array.isArray(messages));
    this.#drawChat();
  }

  /** Put an answer behind the messages that were sent, and a place for the next one, unless they have been changed. */
  addAnswer(sent, text) {
    const now = this.#messages.filter((one) => one.content !== "");
    const isSame = (one, at) => one.role === now[at]?.role && one.content === now[at].content;
    if (!sent.every(isSame)) return;
    const next = now.slice(sent.length); // written in the meantime
    const place = { role: "user", content: "" };
    this.#messages = [...sent, { role: "assistant", content: text }, ...(next.length ? next : [place])];
    this.#drawChat();
  }

  get isChat() {
    return this.#isChat;
  }

  focus() {
    (this.#isChat ? this.#chat.querySelector(".message:last-child textarea") : this.#prompt)?.focus();
  }

  #setMode(isChat) {
    this.#isChat = isChat;
    this.#prompt.hidden = isChat;
    this.#chat.hidden = !isChat;
    this.#modes.forEach((one, place) => one.setAttribute("aria-pressed", String((place === 1) === isChat)));
    this.onchange();
  }

  #drawChat() {
    replace(
      this.#chat,
      this.#messages.map((message, place) => this.#drawMessage(message, place)),
      button("Add a message", () => this.#change([...this.#messages, { role: "user", content: "" }]), {
        class: "quiet",
      }),
    );
  }

  #change(messages) {
    this.#messages = messages;
    this.#drawChat();
    this.onchange();
    this.focus();
  }

  #drawMessage(message, place) {
    const role = el(
      "select",
      {
        "aria-label": `Role of message ${place + 1}`,
        onchange: (event) => {
          message.role = event.target.value;
          this.onchange();
        },
      },
      [...new Set([...ROLES, message.role])].map((one) =>
        el("option", { value: one, selected: one === message.role }, one),
      ),
    );
    const text = el("textarea", {
      rows: 2,
      dir: "auto",
      value: message.content,
      placeholder: "A message",
      "aria-label": `Message ${place + 1}`,
      oninput: (event) => {
        message.content = event.target.value;
        this.onchange();
      },
    });
    const remove = button("×", () => this.#change(this.#messages.filter((one) => one !== message)), {
      "aria-label": `Remove message ${place + 1}`,
      class: "reset",
      hidden: this.#messages.length === 1,
    });
    return el("div", { class: "message" }, el("div", { class: "message-head" }, role, remove), text);
  }
}
