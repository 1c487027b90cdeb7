// What the tint of a token can mean. Each meaning gives a class, so that colours stay in the style sheets, where
// every step of a scale has an underline of its own too: colour is never the only sign.

const PROBABILITY = [0.5, 0.2, 0.05, 0.01, 0.001]; // below each one, one step stronger
const ENTROPY = [0.5, 1.5, 2.5, 3.5, 4.5]; // nats

function step(value, bounds, isAbove) {
  let level = 0;
  for (const bound of bounds) if (isAbove ? value > bound : value < bound) level += 1;
  return level;
}

function probabilityOf(token) {
  const logprob = token.raw_logprob ?? token.logprob;
  return Number.isFinite(logprob) ? Math.exp(logprob) : null;
}

export const COLOURINGS = [
  {
    id: "probability",
    name: "probability",
    has: () => true,
    of: (token) => {
      const p = probabilityOf(token);
      return p === null ? "" : `warm${step(p, PROBABILITY, false)}`;
    },
    legend: [
      ["warm0", "over 50 %"],
      ["warm1", "20–50 %"],
      ["warm2", "5–20 %"],
      ["warm3", "1–5 %"],
      ["warm4", "0.1–1 %"],
      ["warm5", "under 0.1 %"],
    ],
  },
  {
    id: "entropy",
    name: "entropy",
    has: (tokens) => tokens.some((token) => Number.isFinite(token.raw_entropy ?? token.entropy)),
    of: (token) => {
      const entropy = token.raw_entropy ?? token.entropy;
      return Number.isFinite(entropy) ? `cold${step(entropy, ENTROPY, true)}` : "";
    },
    legend: [
      ["cold0", "the model is sure"],
      ["cold2", "1.5 nats"],
      ["cold4", "3.5 nats"],
      ["cold5", "anything may come"],
    ],
  },
  {
    id: "rank",
    name: "rank",
    has: (tokens) => tokens.some((token) => token.rank),
    of: (token) => (token.rank ? `warm${step(token.rank, [1, 2, 5, 20, 100], true)}` : ""),
    legend: [
      ["warm0", "likeliest"],
      ["warm1", "second"],
      ["warm2", "3rd to 5th"],
      ["warm3", "to 20th"],
      ["warm4", "to 100th"],
      ["warm5", "beyond"],
    ],
  },
  {
    id: "drafts",
    name: "drafts",
    has: (tokens) => tokens.some((token) => token.draft),
    of: (token) => (token.draft ? `draft-${token.draft}` : "draft-none"),
    legend: [
      ["draft-accepted", "✓ drafted and accepted"],
      ["draft-corrected", "corrected by the model"],
      ["draft-bonus", "bonus: came with the check"],
      ["draft-none", "not drafted"],
    ],
  },
  {
    id: "watermark",
    name: "watermark",
    has: (tokens) => tokens.some((token) => token.watermark),
    of: (token) => ({ true: "mark-green", false: "mark-red" })[token.watermark?.green] ?? "mark-none",
    legend: [
      ["mark-green", "green list"],
      ["mark-red", "red list"],
      ["mark-none", "not scored"],
    ],
  },
  {
    id: "grammar",
    name: "grammar",
    has: (tokens) => tokens.some((token) => token.grammar),
    of: (token) =>
      !token.grammar
        ? ""
        : token.grammar.forced || token.grammar.allowed === 1
          ? "forced"
          : `cold${5 - step(token.grammar.allowed, [1, 10, 100, 1000, 10000], true)}`,
    legend: [
      ["forced", "one token alone was allowed"],
      ["cold4", "few allowed"],
      ["cold1", "most allowed"],
    ],
  },
  {
    id: "layers",
    name: "DoLa layer",
    has: (tokens) => tokens.some((token) => token.dola),
    of: (token) => (token.dola ? `group${token.dola.layer % 8}` : ""),
    legend: [["group0", "a colour for each layer that was contrasted"]],
  },
  {
    id: "time",
    name: "time",
    has: (tokens) => tokens.some((token) => token.ms),
    of: (token) => (token.ms ? `cold${step(token.ms, [5, 15, 40, 100, 300], true)}` : ""),
    legend: [
      ["cold0", "under 5 ms"],
      ["cold2", "15 ms"],
      ["cold3", "40 ms"],
      ["cold5", "300 ms and more"],
    ],
  },
  { id: "none", name: "nothing", has: () => true, of: () => "", legend: [] },
];

/** The colouring that shows most of what a run did. */
export function usualColouring(tokens) {
  for (const id of ["drafts", "watermark"]) if (COLOURINGS.find((one) => one.id === id).has(tokens)) return id;
  return "probability";
}

export function findColouring(id) {
  return COLOURINGS.find((one) => one.id === id) ?? COLOURINGS[0];
}
