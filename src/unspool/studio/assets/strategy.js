// Which views a run has, beside its text: those for which it brought something.

import { BeamView } from "./beam_view.js";
import { card, el } from "./dom.js";
import { DraftView } from "./draft_view.js";
import { LayerView } from "./layer_view.js";
import { drawMoments, findMoments } from "./moments_view.js";
import { readTokens } from "./run.js";

const TITLES = { contrastive: "Contrastive search", guidance: "Guidance", grammar: "Grammar", watermark: "Watermark" };

export class StrategyViews {
  element = el("div", { class: "strategy" });
  beams = new BeamView();
  drafts = new DraftView();
  layers = new LayerView();
  onselect = () => {};
  #cards = new Map();
  #run = null;
  #drawnAt = 0;

  constructor() {
    for (const view of [this.drafts, this.layers]) view.onselect = (place) => this.onselect(place);
  }

  show(run) {
    this.#run = run;
    this.#cards.clear();
    this.element.replaceChildren();
    this.beams.show(run);
    this.drafts.show(run);
    this.update(true);
  }

  update(isWhole = false) {
    const run = this.#run;
    if (run === null) return;
    if (run.beams.length) {
      this.#place("beams", "The beams", this.beams.element);
      this.beams.update();
    }
    if (run.rounds.length) {
      this.#place("drafts", "Drafts", this.drafts.element);
      this.drafts.update();
    }
    // What is drawn anew each time waits a little while tokens come.
    if (!isWhole && run.status === "running" && performance.now() - this.#drawnAt < 200) return;
    this.#drawnAt = performance.now();
    const tokens = readTokens(run);
    if (tokens.some((token) => token.dola)) {
      this.#place("dola", "DoLa’s layers", this.layers.element);
      this.layers.draw(tokens);
    }
    for (const kind of findMoments(tokens)) {
      drawMoments(kind, tokens, this.#place(kind.id, TITLES[kind.id], el("div")), (place) => this.onselect(place));
    }
  }

  #place(id, title, body) {
    if (!this.#cards.has(id)) {
      this.#cards.set(id, body);
      this.element.append(card(title, { id: `view-${id}` }, body));
    }
    return this.#cards.get(id);
  }
}
