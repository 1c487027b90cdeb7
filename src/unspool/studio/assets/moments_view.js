// Strategies shown by their moments: the tokens at which guidance, contrastive search, a grammar or a watermark
// made a difference.

import { el, button, replace, scroller } from "./dom.js";
import { count, number, percent, showToken } from "./wording.js";

const MOST = 40;

const KINDS = [
  {
    id: "contrastive",
    has: (token) => token.contrastive,
    columns: ["written", "likeliest", "its penalty"],
    read: (token) => {
      const { candidates } = token.contrastive;
      const likeliest = candidates.reduce((best, one) => (one.p > best.p ? one : best));
      const chosen = candidates.find((one) => one.chosen) ?? candidates[0];
      if (likeliest.id === chosen.id) return null;
      return [
        `${showToken(chosen.text)} ${percent(chosen.p)}`,
        `${showToken(likeliest.text)} ${percent(likeliest.p)}`,
        `${number(likeliest.penalty)}, not ${number(chosen.penalty)}`,
      ];
    },
    say: (moments, num) =>
      `At ${count(moments)} of ${count(num, "token")} the likeliest was too like the text so far, and another was written.`,
  },
  {
    id: "guidance",
    has: (token) => token.guidance,
    columns: ["with guidance", "without"],
    read: (token) => {
      const [led, free] = [token.guidance.with?.[0], token.guidance.without?.[0]];
      return !led || !free || led.id === free.id
        ? null
        : [`${showToken(led.text)} ${percent(led.p)}`, `${showToken(free.text)} ${percent(free.p)}`];
    },
    say: (moments, num) => `Guidance changed the likeliest token at ${count(moments)} of ${count(num, "token")}.`,
  },
  {
    id: "grammar",
    has: (token) => token.grammar,
    columns: ["written", "tokens allowed", "the model alone"],
    read: (token) => {
      const free = token.top?.[0];
      if (!free || free.id === token.id) return null;
      return [showToken(token.text), count(token.grammar.allowed), `${showToken(free.text)} ${percent(free.raw)}`];
    },
    say: (moments, num, tokens) => {
      const forced = tokens.filter((token) => token.grammar?.forced || token.grammar?.allowed === 1).length;
      return `The grammar left one token alone ${count(forced, "time")}, and kept the model from its likeliest at ${count(moments)} of ${count(num, "token")}.`;
    },
  },
  {
    id: "watermark",
    has: (token) => token.watermark,
    columns: [],
    read: () => null,
    say: (moments, num, tokens) => {
      const scored = tokens.filter((token) => typeof token.watermark?.green === "boolean");
      const green = scored.filter((token) => token.watermark.green).length;
      const z = tokens.findLast((token) => Number.isFinite(token.watermark?.z))?.watermark.z;
      const proof =
        z >= 4 ? "far beyond chance: this text is marked" : z >= 2 ? "unlikely by chance" : "not yet beyond chance";
      return `${count(green)} of ${count(scored.length)} scored tokens are green (${percent(scored.length ? green / scored.length : 0)}); z = ${number(z)}, ${proof}.`;
    },
  },
];

/** Which of these views a run has something for. */
export function findMoments(tokens) {
  return KINDS.filter((kind) => tokens.some((token) => kind.has(token)));
}

export function drawMoments(kind, tokens, element, onselect) {
  const relevant = tokens.filter((token) => kind.has(token));
  const rows = [];
  tokens.forEach((token, place) => {
    const cells = kind.has(token) ? kind.read(token) : null;
    if (cells) rows.push({ place, cells });
  });
  replace(
    element,
    el("p", { class: "verdict" }, kind.say(rows.length, relevant.length, relevant)),
    rows.length
      ? scroller(
          `Tokens: ${kind.id}`,
          { class: "scroll" },
          el(
            "table",
            { class: "moments" },
            el(
              "thead",
              {},
              el(
                "tr",
                {},
                el("th", { scope: "col" }, "token"),
                kind.columns.map((name) => el("th", { scope: "col" }, name)),
              ),
            ),
            el(
              "tbody",
              {},
              rows.slice(0, MOST).map(({ place, cells }) =>
                el(
                  "tr",
                  {},
                  el(
                    "th",
                    { scope: "row" },
                    button(String(place + 1), () => onselect(place), {
                      class: "link",
                      "aria-label": `Show token ${place + 1}`,
                    }),
                  ),
                  cells.map((cell) => el("td", {}, cell)),
                ),
              ),
            ),
          ),
        )
      : null,
    rows.length > MOST ? el("p", { class: "muted small" }, `${count(rows.length - MOST)} more`) : null,
  );
}
