// The middle of the page: the text of a run, its strategy, its ribbons, and what was tried.

import { COLOURINGS, findColouring, usualColouring } from "./colours.js";
import { button, card, el, oncePerFrame, replace } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Ribbons } from "./ribbons.js";
import { readTokens, totalLogprob } from "./run.js";
import { StrategyViews } from "./strategy.js";
import { TokenText } from "./text.js";
import { TriedTree } from "./tried.js";
import { count, nameStrategy, number } from "./wording.js";

export class WriteView {
  inspector = new Inspector();
  text = new TokenText();
  #book;
  #colouring = null; // chosen by hand
  #strategy = new StrategyViews();
  #ribbons = new Ribbons();
  #ribbonsAt = 0;
  #tried = new TriedTree();
  #title = el("h2", {}, "The text");
  #status = el("span", { class: "status" });
  #colours = el("select", { id: "colour", onchange: (event) => this.#chooseColour(event.target.value) });
  #legend = el("p", { class: "legend", id: "legend" });
  #prompt = el("div", {
    class: "prompt-shown",
    dir: "auto",
    tabindex: "0",
    role: "group",
    "aria-label": "What was sent",
  });
  #notice = el("div", { class: "notice", role: "alert", hidden: true });
  #ribbonCard = card("Along the text", { id: "view-ribbons", kind: "wide" }, this.#ribbons.element);
  #triedCard = card("What was tried", { id: "view-tried" }, this.#tried.element);
  #paint = oncePerFrame(() => this.#update());
  element = el("div", { class: "middle" });

  constructor(book, { isKept = false } = {}) {
    this.#book = book;
    const colour = el("label", { class: "colour-by" }, "colour by ", this.#colours);
    this.element.append(
      el(
        "section",
        { class: "card text-card", "aria-label": "The text" },
        el("header", { class: "card-head" }, el("div", {}, this.#title, this.#status), colour),
        this.#prompt,
        this.text.element,
        this.#notice,
        this.#legend,
      ),
      this.#strategy.element,
      this.#ribbonCard,
      this.#triedCard,
      this.text.tip,
    );
    this.isKept = isKept;
    this.text.onselect = (index) => book.select(index);
    this.text.onopen = () => this.inspector.focus();
    this.#ribbons.onselect = this.#strategy.onselect = (index) => this.pin(index);
    this.#strategy.beams.onbranch = (run, tokens, text) => this.#branch(() => book.branchFrom(run, tokens, text));
    this.inspector.onbranch = (run, index, one) => this.#branch(() => book.branch(run, index, one));
    this.inspector.onclose = () => {
      this.text.pin(null);
      this.text.element.focus(); // the button that was pressed is not shown any more
    };
    this.#tried.onshow = (id) => book.show(id);
    book.listen((kind, run) => this.#hear(kind, run));
    this.#show();
  }

  pin(index) {
    this.text.pin(index);
    this.text.element.querySelector(".is-selected")?.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  #branch(begin) {
    if (this.isKept) return;
    begin();
    this.text.element.focus();
  }

  #hear(kind, run) {
    if (kind === "shown") this.#show();
    else if (kind === "selected") this.#look();
    else if (run === this.#book.current) this.#paint();
    else if (kind === "ended") this.#tried.draw(this.#book);
  }

  #show() {
    const run = this.#book.current;
    this.#triedCard.hidden = this.#book.runs.size === 0;
    this.#ribbonCard.hidden = true;
    this.#colouring = null;
    this.#tried.draw(this.#book);
    if (run === null) {
      replace(
        this.#prompt,
        el(
          "span",
          { class: "muted" },
          "Choose a preset or write a prompt, then press Write. Each token that comes can be looked into, and changed.",
        ),
      );
      this.inspector.show(null, null);
      return;
    }
    this.text.show(run);
    this.#strategy.show(run);
    this.#update();
  }

  #update() {
    const run = this.#book.current;
    if (run === null) return;
    const tokens = readTokens(run);
    this.#title.textContent = run.label && !run.start ? run.label : nameStrategy(run.start?.strategy);
    replace(this.#prompt, showPrompt(run));
    this.text.update();
    this.#offerColours(tokens);
    this.#strategy.update(run.status !== "running");
    this.#drawRibbons(run, tokens);
    this.#drawStatus(run, tokens);
    this.#drawNotice(run, tokens);
    if (run.status !== "running" || this.#tried.element.childElementCount === 0) this.#tried.draw(this.#book);
    this.#look();
  }

  #look() {
    const run = this.#book.current;
    this.inspector.show(run, this.#book.selected, this.text.pinned !== null);
    this.#ribbons.mark(this.#book.selected);
  }

  #drawRibbons(run, tokens) {
    this.#ribbonCard.hidden = tokens.length < 2;
    if (run.status === "running" && performance.now() - this.#ribbonsAt < 150) return;
    this.#ribbonsAt = performance.now();
    if (tokens.length >= 2) this.#ribbons.draw(tokens);
  }

  // --- colours ---------------------------------------------------------------------------------------------------
  #offerColours(tokens) {
    const fitting = COLOURINGS.filter((one) => one.has(tokens));
    const wanted = this.#colouring ?? usualColouring(tokens);
    const ids = fitting.map((one) => one.id).join();
    if (this.#colours.dataset.ids !== ids) {
      this.#colours.dataset.ids = ids;
      replace(
        this.#colours,
        fitting.map((one) => el("option", { value: one.id }, one.name)),
      );
    }
    this.#colours.value = wanted;
    if (this.#legend.dataset.of === wanted && this.#legend.dataset.run === String(this.#book.shown)) return;
    this.#legend.dataset.of = wanted;
    this.#legend.dataset.run = this.#book.shown;
    this.text.colour(wanted);
    replace(
      this.#legend,
      findColouring(wanted).legend.map(([kind, name]) =>
        el("span", { class: "key" }, el("span", { class: `swatch t ${kind}` }, "abc"), name),
      ),
    );
  }

  #chooseColour(id) {
    this.#colouring = id;
    this.#offerColours(readTokens(this.#book.current));
  }

  // --- how it goes -----------------------------------------------------------------------------------------------
  #drawStatus(run, tokens) {
    const { total, num } = totalLogprob(run);
    const facts = [count(tokens.length, "token")];
    const speed = run.end?.stats?.tokens_per_second;
    if (Number.isFinite(speed)) facts.push(`${number(speed, 1)} per second`);
    if (num) facts.push(`log-probability ${number(total)}`);
    if (run.end?.finish_reason) facts.push(`ended by ${run.end.finish_reason}`);
    if (run.status === "running") facts.push("writing…");
    this.#status.textContent = facts.join(" · ");
  }

  #drawNotice(run, tokens) {
    this.#notice.hidden = !["lost", "failed", "stopped"].includes(run.status);
    if (this.#notice.hidden) return;
    const words = { stopped: "Stopped.", lost: run.error, failed: run.error };
    const canResume = !this.isKept && (run.status !== "failed" || run.start !== null);
    const came = tokens.length && run.status === "lost" ? ` What came is kept: ${count(tokens.length, "token")}.` : "";
    replace(
      this.#notice,
      el("span", {}, `${words[run.status] ?? ""}${came}`),
      canResume
        ? button(tokens.length ? "Resume" : "Try again", () => this.#branch(() => this.#book.resume(run)), {
            class: "small",
            id: "resume",
          })
        : null,
    );
    this.#notice.classList.toggle("is-bad", run.status !== "stopped");
  }
}

function showPrompt(run) {
  const { request } = run;
  if (Array.isArray(request.messages)) {
    return request.messages.map((one) => el("p", { class: "said" }, el("b", {}, `${one.role} `), one.content));
  }
  return el("p", {}, typeof request.prompt === "string" ? request.prompt : JSON.stringify(request.prompt));
}
