// The tree of what was tried: every run, and the branches that were taken from it.

import { el, button, replace } from "./dom.js";
import { plainText, readTokens } from "./run.js";
import { count, nameStrategy, shorten, showToken } from "./wording.js";

const SIGNS = { running: "…", done: "", stopped: "stopped", lost: "lost", failed: "failed" };

export class TriedTree {
  element = el("nav", { class: "tried", "aria-label": "What was tried" });
  onshow = () => {};

  draw(book) {
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.run : undefined;
    const children = new Map();
    for (const run of book.runs.values()) {
      const above = run.parent?.run ?? null;
      children.set(above, [...(children.get(above) ?? []), run]);
    }
    replace(this.element, this.#list(children, null, book.shown));
    if (focused !== undefined) this.element.querySelector(`[data-run="${focused}"]`)?.focus();
  }

  #list(children, above, shown) {
    const runs = children.get(above) ?? [];
    return runs.length
      ? el(
          "ul",
          {},
          runs.map((run) => el("li", {}, this.#entry(run, shown), this.#list(children, run.id, shown))),
        )
      : null;
  }

  #entry(run, shown) {
    const own = readTokens(run).slice(run.parent ? run.parent.index : 0);
    const text = run.parent ? own.map((token) => token.delta ?? token.text).join("") : plainText(run);
    return button(
      [
        el(
          "span",
          { class: "tried-head" },
          `${run.id}`,
          el("span", { class: "muted" }, ` ${describeOrigin(run)} · ${count(readTokens(run).length, "token")}`),
          SIGNS[run.status] ? el("span", { class: "badge" }, SIGNS[run.status]) : null,
        ),
        el(
          "span",
          { class: "tried-text", dir: "auto" },
          shorten(text.replace(/\s+/g, " ").trim(), 110) || "nothing yet",
        ),
      ],
      () => this.onshow(run.id),
      { class: "tried-run", data: { run: run.id }, "aria-current": run.id === shown ? "true" : undefined },
    );
  }
}

function describeOrigin(run) {
  if (!run.parent) return run.label || nameStrategy(run.start?.strategy);
  if (run.parent.isResumed) return "resumed";
  const from = run.parent.from ? `${showToken(run.parent.from)} → ` : "";
  return `at ${run.parent.index + 1}: ${from}${showToken(run.parent.text)}`;
}
