// Shorten: a text with each token's loss, what goes struck through, and what is left.

import { postShort, ServerError } from "./api.js";
import { button, card, el, replace } from "./dom.js";
import { count, number, percent, showToken } from "./wording.js";

const LOSSES = [0.7, 1.6, 3, 4.6, 6.9]; // nats; above each one, one step stronger

function findTint(loss) {
  return loss === null ? "" : `warm${LOSSES.filter((bound) => loss > bound).length}`;
}

export class ShortView {
  element;
  #readText;
  #num = 0; // of the last request: answers to others are late
  #rate = el("input", { type: "range", id: "short-rate", min: "0.05", max: "1", step: "0.05", value: "0.5" });
  #shown = el("output", { for: "short-rate" }, "50 %");
  #question = el("input", { type: "text", id: "short-question", dir: "auto" });
  #digits = el("input", { type: "checkbox", id: "short-digits" });
  #run = button("Shorten", () => this.start(), { class: "primary", id: "short-run" });
  #verdict = el("p", { class: "verdict", role: "status" });
  #tokens = el("div", { class: "short-text", dir: "auto" });
  #left = el("pre", { class: "short-left", dir: "auto", tabindex: "0", "aria-label": "What is left" });

  /** `readText` gives the model and the texts to shorten, or throws what is missing. */
  constructor(readText) {
    this.#readText = readText;
    this.#rate.addEventListener("input", () => (this.#shown.textContent = percent(Number(this.#rate.value))));
    this.element = card(
      "Shorten",
      { id: "shorten", kind: "shorten" },
      el(
        "p",
        { class: "muted" },
        "The prompt on the left without the tokens that the model could have guessed. With a question, what it makes ",
        "likelier stays. The stronger the tint, the greater a token's loss.",
      ),
      el(
        "div",
        { class: "short-tools" },
        el("label", { for: "short-rate" }, "Share that stays"),
        this.#rate,
        this.#shown,
        el("label", { for: "short-question" }, "Question"),
        this.#question,
        el("label", { for: "short-digits" }, this.#digits, " digits stay"),
        this.#run,
      ),
      this.#verdict,
      this.#tokens,
      this.#left,
    );
  }

  async start() {
    const num = ++this.#num;
    try {
      const asked = { ...this.#readText(), rate: Number(this.#rate.value), keep_digits: this.#digits.checked };
      if (this.#question.value.trim()) asked.question = this.#question.value;
      this.#verdict.textContent = "Reading…";
      const made = await postShort(asked);
      if (num === this.#num) this.#draw(made);
    } catch (error) {
      if (num !== this.#num) return;
      const isOurs = error instanceof ServerError || !(error instanceof TypeError);
      this.#verdict.textContent = isOurs ? error.message : "The server can't be reached.";
    }
  }

  #draw(made) {
    const before = count(made.origin_tokens, "token");
    this.#verdict.textContent = `${before}, ${count(made.compressed_tokens)} left (${percent(made.rate)}), in ${number(made.seconds, 1)} s.`;
    const parts = [];
    made.tokens.forEach((token, place) => {
      if (place > 0 && token.context !== made.tokens[place - 1].context) parts.push(el("hr"));
      const loss = token.loss === null ? "not read" : `loss ${number(token.loss)}`;
      const title = `${showToken(token.text)}: ${loss}, ${token.is_kept ? "stays" : "goes"}`;
      const kind = token.is_kept ? "ins" : "del";
      parts.push(el(kind, { class: `t ${findTint(token.loss)}`, title }, token.text));
    });
    replace(this.#tokens, parts);
    this.#left.textContent = made.compressed_prompt;
  }
}
