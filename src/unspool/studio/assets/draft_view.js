// Speculation, round by round: what was drafted, what the model accepted, and what it wrote instead.

import { el, replace } from "./dom.js";
import { count, showToken } from "./wording.js";

const SIGNS = { accepted: "✓", rejected: "✕", unused: "–" };
const MOST_ROUNDS = 200; // drawn; a long text has thousands

export class DraftView {
  element = el("div", { class: "draft-view" });
  onselect = () => {};
  #run = null;
  #drawn = 0;
  #verdict = el("p", { class: "verdict" });
  #gauge = el("div", { class: "gauge", role: "img" });
  #list = el("ol", { class: "rounds", tabindex: "0", "aria-label": "Rounds" });

  constructor() {
    const legend = el(
      "p",
      { class: "legend" },
      el("span", { class: "key accepted" }, "✓ accepted"),
      el("span", { class: "key rejected" }, "✕ rejected"),
      el("span", { class: "key unused" }, "– not reached"),
      el("span", { class: "key written" }, "written by the model"),
    );
    this.element.append(this.#verdict, this.#gauge, legend, this.#list);
  }

  show(run) {
    this.#run = run;
    this.#drawn = 0;
    this.#list.replaceChildren();
    this.update();
  }

  update() {
    const run = this.#run;
    const last = run?.rounds.at(-1);
    if (!last) return;
    const { total_accepted: accepted, total_drafted: drafted } = last;
    const rate = drafted ? accepted / drafted : 0;
    this.#verdict.textContent = `${count(accepted)} of ${count(drafted)} drafted tokens accepted (${Math.round(rate * 100)} %), in ${count(run.rounds.length, "round")}.`;
    this.#gauge.setAttribute("aria-label", this.#verdict.textContent);
    this.#gauge.style.setProperty("--width", `${rate * 100}%`);
    // The last round drawn may have been waiting for the model's own token.
    if (this.#drawn) {
      this.#list.lastElementChild?.remove();
      this.#drawn -= 1;
    }
    for (; this.#drawn < run.rounds.length; this.#drawn += 1) {
      this.#list.append(this.#drawRound(run.rounds[this.#drawn], this.#drawn));
      if (this.#list.childElementCount > MOST_ROUNDS) this.#list.firstElementChild.remove();
    }
  }

  #drawRound(round, place) {
    const own = this.#ownToken(round);
    const chips = round.tokens.map((token) =>
      el(
        "span",
        { class: `draft-chip ${token.verdict}` },
        el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[token.verdict] ?? ""),
        el("span", { class: "draft-text", dir: "auto" }, showToken(token.text)),
        el("span", { class: "sr" }, ` ${token.verdict}`),
      ),
    );
    return el(
      "li",
      { value: place + 1, class: "round" },
      el("span", { class: "round-rate" }, `${round.accepted}/${round.drafted}`),
      el(
        "span",
        { class: "round-chips" },
        round.tokens.length ? chips : el("span", { class: "muted" }, "nothing drafted"),
        own && [
          el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
          el(
            "button",
            {
              type: "button",
              class: `draft-chip written ${own.draft ?? ""}`,
              "aria-label": `written by the model: ${showToken(own.text)}`,
              onclick: () => this.onselect(own.place),
            },
            showToken(own.text),
          ),
        ],
      ),
    );
  }

  /** The token that the model itself wrote in a round: the first that was not an accepted draft. */
  #ownToken(round) {
    const place = round.index + round.accepted;
    const token = this.#run.tokens[place];
    return token && token.draft !== "accepted" ? { ...token, place } : null;
  }
}
