// Numbers and tokens as people read them.

const MARKS = new Map([
  ["\n", "↵"],
  ["\r", "␍"],
  ["\t", "⇥"],
  [" ", "␣"],
  ["\u00a0", "⍽"],
]);
// Characters that can't be seen, or that would turn the text around them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;

/** A token for a label: spaces at its ends and everything invisible are shown. */
export function showToken(text) {
  if (text === "") return "∅";
  return text
    .replace(/^[ \u00a0]+|[ \u00a0]+$/g, (found) => found.replace(/./gu, (one) => MARKS.get(one)))
    .replace(HIDDEN, (one) => MARKS.get(one) ?? `⟨${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

export function shorten(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}

export function percent(p) {
  if (p === null || p === undefined || Number.isNaN(p)) return "–";
  if (p === 0) return "0 %";
  const share = p * 100;
  if (share >= 99.95) return "100 %";
  if (share >= 10) return `${share.toFixed(share >= 99 ? 1 : 0)} %`;
  if (share >= 1) return `${share.toFixed(1)} %`;
  return share >= 0.01 ? `${share.toFixed(2)} %` : "< 0.01 %";
}

export function number(value, places = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toFixed(places).replace("-", "−");
}

const GROUPED = new Intl.NumberFormat("en");

export function count(value, one, many = `${one}s`) {
  const shown = GROUPED.format(value);
  return one === undefined ? shown : `${shown} ${value === 1 ? one : many}`;
}

/** A setting's value in a few characters. */
export function shortValue(value) {
  return shorten(typeof value === "string" ? value : (JSON.stringify(value) ?? "null"), 28);
}

const STRATEGIES = {
  greedy: "Greedy search",
  greedy_search: "Greedy search",
  sample: "Sampling",
  sampling: "Sampling",
  beam_search: "Beam search",
  beams: "Beam search",
  beam: "Beam search",
  beam_sample: "Beam sampling",
  group_beam_search: "Diverse beam search",
  diverse_beam_search: "Diverse beam search",
  constrained_beam_search: "Constrained beam search",
  contrastive_search: "Contrastive search",
  contrastive: "Contrastive search",
  dola: "DoLa",
  dola_generation: "DoLa",
  assisted_generation: "Speculative decoding",
  assisted: "Speculative decoding",
  speculative: "Speculative decoding",
  prompt_lookup: "Prompt lookup",
};

export function nameStrategy(strategy) {
  if (!strategy) return "Decoding";
  const known = STRATEGIES[strategy.replaceAll(" ", "_").replaceAll("-", "_")];
  return known ?? strategy.charAt(0).toUpperCase() + strategy.slice(1).replaceAll("_", " ");
}
