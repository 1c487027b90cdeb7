// The written text, token by token: tinted, pointed at, walked through by keys.
// Tokens stand in blocks of a paragraph each, so that a browser lays out only those in view, however long the text is.

import { findColouring } from "./colours.js";
import { el } from "./dom.js";
import { readTokens } from "./run.js";
import { percent, showToken } from "./wording.js";

const LONGEST_BLOCK = 240; // tokens; a paragraph beyond is divided at a space
const PARTIAL = /<0x[0-9A-F]{2}>/;

/** What a token shows in the flow of the text. */
export function flowText(token) {
  const text = PARTIAL.test(token.text) ? token.delta || "▪" : token.text;
  return text === "" ? "▪" : text.replace(/\n/g, "↵");
}

export class TokenText {
  element = el("div", {
    class: "token-text",
    role: "listbox",
    tabindex: "0",
    "aria-label": "Written tokens; arrow keys move, Enter opens a token",
  });
  onselect = () => {}; // (index or null)
  onopen = () => {}; // a token was chosen by Enter
  #run = null;
  #drawn = []; // ids
  #spans = [];
  #colouring = "probability";
  #pinned = null;
  #marked = null;
  #tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });

  constructor() {
    const { element } = this;
    element.addEventListener("pointerover", (event) => this.#hover(event));
    element.addEventListener("pointerleave", () => this.#leave());
    element.addEventListener("click", (event) => this.#click(event));
    element.addEventListener("keydown", (event) => this.#press(event));
  }

  get tip() {
    return this.#tip;
  }

  get pinned() {
    return this.#pinned;
  }

  show(run) {
    this.#run = run;
    this.#drawn = [];
    this.#spans = [];
    this.#pinned = this.#marked = null;
    this.element.replaceChildren();
    this.element.removeAttribute("aria-activedescendant");
    this.update();
  }

  colour(id) {
    this.#colouring = id;
    const { of } = findColouring(id);
    const tokens = this.#run ? readTokens(this.#run) : [];
    this.#spans.forEach((span, place) => this.#dress(span, tokens[place], of, place));
  }

  /** Draw what has come since; a beam's text may also have changed. */
  update() {
    if (this.#run === null) return;
    const tokens = readTokens(this.#run);
    let same = Math.min(this.#drawn.length, tokens.length);
    if (this.#run.beams.length)
      for (same = 0; same < this.#drawn.length && this.#drawn[same] === tokens[same]?.id;) same += 1;
    this.#cut(same);
    const { of } = findColouring(this.#colouring);
    for (let place = same; place < tokens.length; place += 1) this.#add(tokens[place], of, place);
  }

  #cut(length) {
    for (const span of this.#spans.splice(length)) span.remove();
    this.#drawn.length = length;
    while (this.element.lastElementChild && !this.element.lastElementChild.childElementCount)
      this.element.lastElementChild.remove();
  }

  #add(token, of, place) {
    const span = el("span", { data: { i: place } }, flowText(token));
    this.#dress(span, token, of, place);
    this.#block(token).append(span);
    this.#spans.push(span);
    this.#drawn.push(token.id);
  }

  #dress(span, token, of, place) {
    const extra = `${token.byHand ? " by-hand" : ""}${PARTIAL.test(token.text) ? " partial" : ""}${place === this.#marked ? " is-selected" : ""}`;
    span.className = `t ${of(token)}${extra}`;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", String(place === this.#marked));
    // A space has no letters that could name it.
    if (span.textContent.trim() === "") span.setAttribute("aria-label", showToken(token.text));
  }

  #block(token) {
    const last = this.element.lastElementChild;
    const before = this.#spans.at(-1);
    const isFull = last && last.childElementCount >= LONGEST_BLOCK && /^[\s]/.test(token.text);
    if (last && before && !before.textContent.includes("↵") && !isFull) return last;
    const block = el("div", { class: "block", dir: "auto", role: "presentation" });
    this.element.append(block);
    return block;
  }

  // --- choosing a token ------------------------------------------------------------------------------------------
  #placeOf(event) {
    const span = event.target.closest?.(".t");
    return span ? Number(span.dataset.i) : null;
  }

  #hover(event) {
    const place = this.#placeOf(event);
    this.#showTip(place);
    if (place !== null && this.#pinned === null) this.#mark(place);
  }

  #leave() {
    this.#showTip(null);
    if (this.#pinned === null) this.#mark(null);
  }

  #click(event) {
    const place = this.#placeOf(event);
    this.pin(place === this.#pinned ? null : place);
  }

  pin(place) {
    this.#pinned = place;
    this.#mark(place);
    // Where the inspector is a sheet from below, the token stays above it.
    if (place !== null && matchMedia("(max-width: 1240px)").matches)
      this.#spans[place]?.scrollIntoView({ block: "nearest" });
  }

  #mark(place) {
    if (this.#marked !== null) {
      this.#spans[this.#marked]?.classList.remove("is-selected");
      this.#spans[this.#marked]?.setAttribute("aria-selected", "false");
      this.#spans[this.#marked]?.removeAttribute("id");
    }
    this.#marked = place;
    const span = place === null ? undefined : this.#spans[place];
    if (span) {
      const token = readTokens(this.#run)[place];
      span.classList.add("is-selected");
      span.setAttribute("aria-selected", "true");
      span.setAttribute("aria-label", describeToken(token));
      span.id = "token-marked";
      this.element.setAttribute("aria-activedescendant", span.id);
    } else this.element.removeAttribute("aria-activedescendant");
    this.onselect(place);
  }

  #showTip(place) {
    const span = place === null ? undefined : this.#spans[place];
    this.#tip.hidden = span === undefined;
    if (!span) return;
    this.#tip.textContent = describeToken(readTokens(this.#run)[place]);
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), innerWidth - this.#tip.offsetWidth - 8);
    this.#tip.style.setProperty("left", `${left}px`);
    this.#tip.style.setProperty("top", `${box.top - this.#tip.offsetHeight - 6}px`);
  }

  #press(event) {
    const last = this.#spans.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.#pinned ?? this.#marked ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const block = this.#spans[Math.max(0, Math.min(at, last))].parentElement;
    const ahead = getComputedStyle(block).direction === "rtl" ? -1 : 1;
    const moves = {
      ArrowRight: at + ahead,
      ArrowLeft: at - ahead,
      Home: 0,
      End: last,
      ArrowDown: this.#lineAway(at, 1),
      ArrowUp: this.#lineAway(at, -1),
      PageDown: at + 50,
      PageUp: at - 50,
    };
    if (event.key in moves) {
      event.preventDefault();
      this.pin(Math.max(0, Math.min(last, moves[event.key])));
      this.#spans[this.#pinned].scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.#pinned !== null) this.onopen(this.#pinned);
    } else if (event.key === "Escape") this.pin(null);
  }

  /** The token above or below, where the eye would look for it. */
  #lineAway(at, way) {
    const from = this.#spans[Math.max(0, at)]?.getBoundingClientRect();
    if (!from) return at;
    let best = at;
    let bestFar = Infinity;
    let line = null;
    for (let place = at + way; place >= 0 && place < this.#spans.length; place += way) {
      const box = this.#spans[place].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > 4) break;
      const far = Math.abs(box.left - from.left);
      if (far < bestFar) [best, bestFar] = [place, far];
    }
    return best;
  }
}

function describeToken(token) {
  const p = token.raw_logprob ?? token.logprob;
  const facts = [showToken(token.text)];
  if (Number.isFinite(p)) facts.push(percent(Math.exp(p)));
  if (token.rank) facts.push(token.rank === 1 ? "the likeliest" : `rank ${token.rank}`);
  if (token.byHand) facts.push("chosen by you");
  if (token.draft) facts.push(token.draft === "accepted" ? "draft accepted" : token.draft);
  if (typeof token.watermark?.green === "boolean") facts.push(token.watermark.green ? "green" : "red");
  return facts.join(" · ");
}
