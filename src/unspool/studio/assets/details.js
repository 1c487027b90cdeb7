// What a strategy saw at one token: contrastive candidates, DoLa's layers, guidance, watermark, grammar, drafts.

import { el, scroller } from "./dom.js";
import { count, number, percent, showToken } from "./wording.js";

export function strategyDetails(token) {
  return [
    token.contrastive && drawContrastive(token.contrastive),
    token.dola && drawDola(token.dola),
    token.guidance && drawGuidance(token.guidance, token.id),
    token.watermark && drawWatermark(token.watermark),
    token.grammar && drawGrammar(token.grammar),
    token.draft && drawDraft(token.draft),
    token.beam && drawBeam(token.beam),
  ];
}

function part(title, ...children) {
  return el("section", { class: "part" }, el("h3", {}, title), ...children);
}

function drawContrastive({ alpha, candidates }) {
  const rows = candidates.map((one) =>
    el(
      "tr",
      { class: one.chosen ? "is-chosen" : "" },
      el("th", { scope: "row" }, one.chosen ? "▸ " : "", showToken(one.text)),
      el("td", {}, percent(one.p)),
      el("td", {}, meter(one.penalty, "penalty"), number(one.penalty)),
      el("td", { class: "strong" }, number(one.score, 3)),
    ),
  );
  return part(
    "Contrastive search",
    el(
      "p",
      { class: "muted small" },
      `The penalty is the likeness to the text so far. Score = (1 − α) × probability − α × penalty${alpha === undefined ? "" : `, α = ${alpha}`}; the highest is written.`,
    ),
    table("Candidates", ["candidate", "probability", "penalty", "score"], rows),
  );
}

function drawDola({ layer, divergences = [], guesses = [] }) {
  const largest = Math.max(1e-9, ...divergences.map((one) => one.value));
  const guessed = new Map(guesses.map((one) => [one.layer, one]));
  const rows = divergences.map((one) => {
    const guess = guessed.get(one.layer);
    return el(
      "tr",
      { class: one.layer === layer ? "is-chosen" : "" },
      el("th", { scope: "row" }, one.layer === layer ? "▸ " : "", String(one.layer)),
      el("td", {}, meter(one.value / largest, "divergence"), number(one.value, 4)),
      el("td", {}, guess ? `${showToken(guess.text)} ${percent(guess.p)}` : "–"),
    );
  });
  return part(
    "DoLa",
    el("p", { class: "muted small" }, `Layer ${layer} differs most from the last one, and is taken away from it.`),
    table("Layers", ["layer", "divergence", "its guess"], rows),
  );
}

function drawGuidance(guidance, id) {
  const column = (title, list) =>
    el(
      "div",
      { class: "half" },
      el("h4", {}, title),
      el(
        "ol",
        { class: "plain" },
        list
          .slice(0, 8)
          .map((one) =>
            el(
              "li",
              { class: one.id === id ? "is-chosen" : "" },
              el("span", { class: "mini-token" }, showToken(one.text)),
              meter(one.p, "probability"),
              percent(one.p),
            ),
          ),
      ),
    );
  return part(
    "Guidance",
    el("div", { class: "halves" }, column("without", guidance.without ?? []), column("with", guidance.with ?? [])),
  );
}

function drawWatermark({ green, z }) {
  const list =
    typeof green !== "boolean"
      ? "not scored: too few tokens stand before it"
      : green
        ? "on the green list"
        : "on the red list";
  return part("Watermark", el("p", {}, `This token is ${list}. `, Number.isFinite(z) ? `z so far: ${number(z)}.` : ""));
}

function drawGrammar({ allowed, forced }) {
  const said =
    forced || allowed === 1 ? "The grammar left one token alone." : `The grammar allowed ${count(allowed, "token")}.`;
  return part("Grammar", el("p", {}, said));
}

const VERDICTS = {
  accepted: "Drafted, and accepted by the model.",
  corrected: "The draft was rejected here; the model wrote this instead.",
  bonus: "All drafts were accepted, and this one came with the check.",
};

function drawDraft(verdict) {
  return part("Draft", el("p", {}, VERDICTS[verdict] ?? verdict));
}

function drawBeam({ score, progress, group }) {
  return part(
    "Beam",
    el("p", {}, `Score ${number(score, 3)}${group ? `, group ${group + 1}` : ""}.`),
    progress?.length ? drawProgress(progress) : null,
  );
}

export function drawProgress(progress) {
  return el(
    "ul",
    { class: "progress" },
    progress.map(({ phrase, done, of }) =>
      el(
        "li",
        { class: done >= of ? "is-full" : "" },
        el(
          "span",
          { class: "pips", role: "img", "aria-label": `${done} of ${of} tokens` },
          Array.from({ length: Math.min(of, 24) }, (_, place) => el("i", { class: place < done ? "on" : "" })),
        ),
        el("span", {}, showToken(String(phrase))),
      ),
    ),
  );
}

function meter(share, label) {
  const width = `${Math.max(0, Math.min(1, share ?? 0)) * 100}%`;
  return el("span", { class: "meter", role: "img", "aria-label": label, vars: { "--width": width } });
}

function table(label, heads, rows) {
  return scroller(
    label,
    { class: "scroll" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head) => el("th", { scope: "col" }, head)),
        ),
      ),
      el("tbody", {}, rows),
    ),
  );
}
