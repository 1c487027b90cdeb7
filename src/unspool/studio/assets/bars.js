// Alternatives of a token as bars: the model's own probability above, what the processors made of it below.

import { el } from "./dom.js";
import { isBy, keepsLikeliest, nameCut } from "./explaining.js";
import { count, percent, showToken } from "./wording.js";

/** A list of buttons, likeliest first; where a processor cut the rest off, its line is drawn between them. */
export function makeBars(token, settings, onchoose) {
  const top = [...(token.top ?? [])].sort((a, b) => (b.raw ?? b.p ?? 0) - (a.raw ?? a.p ?? 0));
  const largest = Math.max(1e-9, ...top.map((one) => Math.max(one.raw ?? 0, one.p ?? 0)));
  const list = el("ol", { class: "bars", "aria-label": "Alternatives, likeliest first" });
  // What top_p adds up, where nothing has changed the distribution before it.
  const adds = token.steps?.[0]?.setting === "top_p";
  if (top.length) list.append(makeHead(adds, top[0].raw !== null));
  list.classList.toggle("with-sum", adds);
  let wasCut = null;
  let sum = 0;
  for (const one of top) {
    sum += one.raw ?? 0;
    const cut = one.cut_by ?? null;
    if (cut !== null && cut !== wasCut) list.append(makeLine(one, token, settings));
    wasCut = cut;
    list.append(el("li", {}, makeRow(one, token, settings, largest, onchoose, adds ? sum : null)));
  }
  const more = sayRest(token, top, settings);
  if (more) list.append(...more);
  list.addEventListener("keydown", (event) => moveFocus(event, list));
  return list;
}

function makeHead(adds, hasRaw) {
  const names = ["", "", hasRaw ? "model" : "", hasRaw ? "settings" : "", ...(adds ? ["sum"] : [])];
  return el(
    "li",
    { class: "bar-head", "aria-hidden": "true" },
    names.map((name) => el("span", { class: "bar-number" }, name)),
  );
}

/** Where the line lies when it is beyond the tokens that are listed. */
function sayRest(token, top, settings) {
  const step = (token.steps ?? []).findLast((one) => one.removed && keepsLikeliest(one));
  const listed = top.filter((one) => one.cut_by === null).length;
  if (!step || top.some((one) => isBy(one, step)) || step.left <= listed) return null;
  const name = nameCut({ cut_by: step.processor }, token, settings);
  return [
    el("li", { class: "more" }, `… ${count(step.left - listed)} more are kept, down to ${percent(step.line)}`),
    el("li", { class: "cut-line" }, el("span", {}, `${name} cuts here`)),
    el("li", { class: "more" }, `${count(step.removed)} less likely tokens are cut`),
  ];
}

function makeLine(one, token, settings) {
  const step = (token.steps ?? []).find((known) => isBy(one, known));
  const line =
    !step || !keepsLikeliest(step) || !Number.isFinite(step.line) ? "" : ` · keeps ${percent(step.line)} and more`;
  return el("li", { class: "cut-line" }, el("span", {}, `${nameCut(one, token, settings)} cuts here${line}`));
}

function makeRow(one, token, settings, largest, onchoose, sum) {
  const isChosen = one.id === token.id;
  const isCut = one.cut_by !== null && one.cut_by !== undefined;
  const width = (value) => `${((value ?? 0) / largest) * 100}%`;
  // The name of the button is what it shows, with words between that only a screen reader says.
  const heard = (text) => el("span", { class: "sr" }, text);
  const after = isCut ? ` by ${nameCut(one, token, settings)}` : " after the settings";
  return el(
    "button",
    {
      type: "button",
      class: `bar${isChosen ? " is-chosen" : ""}${isCut ? " is-cut" : ""}`,
      "aria-current": isChosen ? "true" : undefined,
      title: `token ${one.id}`,
      onclick: () => onchoose(one),
    },
    el("span", { class: "bar-token", dir: "auto" }, showToken(one.text)),
    el(
      "span",
      { class: "bar-pair", "aria-hidden": "true" },
      one.raw === null ? null : el("span", { class: "bar-raw", vars: { "--width": width(one.raw) } }),
      el("span", { class: "bar-kept", vars: { "--width": width(one.p) } }),
    ),
    el(
      "span",
      { class: "bar-number raw" },
      one.raw === null ? "" : [heard(", "), percent(one.raw), heard(" in the model")],
    ),
    el("span", { class: "bar-number kept" }, heard(", "), isCut ? "cut" : percent(one.p), heard(after)),
    sum === null
      ? null
      : el("span", { class: "bar-number sum" }, heard(", sum "), `${(sum * 100).toFixed(1)}`, heard(" %")),
    heard(isChosen ? ", written" : ", write on from it"),
  );
}

function moveFocus(event, list) {
  const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (way === undefined) return;
  const all = [...list.querySelectorAll("button")];
  const next = all[all.indexOf(document.activeElement) + way];
  if (next) {
    event.preventDefault();
    next.focus();
  }
}
