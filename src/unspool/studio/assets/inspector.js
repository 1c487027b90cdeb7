// The inspector: everything about one token. Which others there were, who cut them, and what the strategy saw.

import { makeBars } from "./bars.js";
import { findParting } from "./beam_paths.js";
import { el, button, replace } from "./dom.js";
import { explainSteps } from "./explaining.js";
import { readTokens } from "./run.js";
import { strategyDetails } from "./details.js";
import { count, number, percent, shortValue, showToken } from "./wording.js";

/** The token to show when none is looked at: the latest, and at the end the most telling one. */
export function tokenToShow(run) {
  const tokens = readTokens(run);
  if (run.status === "running") return tokens.length - 1;
  const parting = run.beams.length ? findParting(run) : null;
  if (parting !== null) return run.base + parting.step; // where the best beam leaves greedy
  const cut = tokens.findIndex((token) => token.top?.some((one) => one.cut_by)); // or something was cut
  return cut < 0 ? tokens.length - 1 : cut;
}

export class Inspector {
  element = el("aside", { class: "inspector", id: "inspector", "aria-label": "The token" });
  onbranch = () => {}; // (run, index, alternative)
  onclose = () => {};
  #body = el("div", { class: "inspector-body" });
  #key = null;

  constructor() {
    this.element.append(
      button("Close", () => this.onclose(), { class: "quiet sheet-close" }),
      this.#body,
    );
  }

  /** Show a token of a run: the one that is looked at, or the latest. */
  show(run, index, isPinned = false) {
    const tokens = run ? readTokens(run) : [];
    const place = index ?? (run ? tokenToShow(run) : -1);
    const token = tokens[place];
    this.element.classList.toggle("is-pinned", isPinned);
    const key = token && `${run.id}:${place}:${token.id}:${index === null}`;
    if (key === this.#key && token) return; // nothing new, and a focused button stays
    this.#key = key;
    replace(this.#body, token ? this.#draw(run, token, place, index === null) : this.#empty());
  }

  focus() {
    (this.#body.querySelector(".bar.is-chosen") ?? this.#body.querySelector(".bar"))?.focus();
  }

  #empty() {
    return [
      el("h2", {}, "The token"),
      el(
        "p",
        { class: "muted" },
        "Write something. Each token then shows here what else could have been written, how likely that was, and which setting ruled it out.",
      ),
    ];
  }

  #draw(run, token, place, isLatest) {
    const settings = { ...run.request, ...run.start?.settings };
    const steps = explainSteps(token, settings);
    const why = steps.map((step) => step.why).filter(Boolean);
    const isFree = token.top?.some((one) => one.raw !== null && one.raw !== undefined);
    return [
      el(
        "p",
        { class: "eyebrow" },
        isLatest && run.status === "running" ? "The latest token" : `Token ${count(place + 1)}`,
      ),
      el("h2", { class: "big-token", dir: "auto" }, showToken(token.text)),
      el("p", { class: "token-facts" }, this.#facts(token)),
      strategyDetails(token),
      why.length
        ? el(
            "div",
            { class: "why" },
            why.map((text) => el("p", {}, text)),
          )
        : null,
      token.top?.length
        ? el(
            "section",
            { class: "part" },
            el("h3", {}, "What else could have come"),
            el(
              "p",
              { class: "bar-legend" },
              isFree ? el("span", { class: "key raw" }, "the model") : null,
              el("span", { class: "key kept" }, isFree ? "after the settings" : "probability in this beam"),
            ),
            makeBars(token, settings, (one) => one.id !== token.id && this.onbranch(run, place, one)),
            el("p", { class: "muted small hint" }, "Choose another to write on from it; this text stays."),
          )
        : null,
      steps.length ? this.#drawSteps(steps) : null,
    ];
  }

  #facts(token) {
    const logprob = token.raw_logprob ?? token.logprob;
    const facts = [];
    if (Number.isFinite(logprob)) facts.push(`${percent(Math.exp(logprob))} likely`);
    if (token.rank) facts.push(token.rank === 1 ? "the likeliest" : `rank ${count(token.rank)}`);
    if (token.byHand) facts.push("chosen by you");
    const raw = token.raw_entropy ?? token.entropy;
    if (Number.isFinite(raw))
      facts.push(
        `entropy ${number(raw)}${Number.isFinite(token.entropy) && token.raw_entropy !== undefined ? ` → ${number(token.entropy)}` : ""} nats`,
      );
    if (Number.isFinite(token.ms)) facts.push(`${number(token.ms, 1)} ms`);
    facts.push(`id ${token.id}`);
    return facts.map((fact) => el("span", {}, fact));
  }

  #drawSteps(steps) {
    const most = Math.log(Math.max(2, steps[0].vocabulary));
    return el(
      "section",
      { class: "part" },
      el("h3", {}, "Who changed the scores, in order"),
      el(
        "ol",
        { class: "steps" },
        steps.map((step) =>
          el(
            "li",
            { class: step.removed ? "cuts" : step.changed ? "" : "idle" },
            el(
              "span",
              { class: "step-name" },
              step.name,
              step.value === undefined ? null : el("b", {}, ` ${shortValue(step.value)}`),
            ),
            el("span", { class: "step-text" }, step.text),
            el("span", {
              class: "funnel",
              "aria-hidden": "true",
              vars: { "--width": `${(Math.log(Math.max(1.15, step.left)) / most) * 100}%` },
            }),
          ),
        ),
      ),
    );
  }
}
