// Why a token could or could not be written, in sentences: from the list of processors of its step.

import { count, percent, shortValue, showToken } from "./wording.js";

/** The processors of a token, each with what it did in words. */
export function explainSteps(token, settings = {}) {
  const vocabulary = firstCount(token);
  return (token.steps ?? []).map((step) => {
    const value = settingValue(step, settings);
    return {
      ...step,
      name: nameStep(step),
      value,
      vocabulary,
      text: sayStep(step, value),
      why: sayLine(step, value, token),
    };
  });
}

function firstCount(token) {
  const first = token.steps?.[0];
  return first ? first.left + first.removed : 0;
}

export function nameStep(step) {
  return step.setting ?? step.processor;
}

function settingValue(step, settings) {
  return step.setting && Object.hasOwn(settings, step.setting) ? settings[step.setting] : undefined;
}

function sayStep(step) {
  const parts = [];
  if (step.removed) parts.push(`cut ${count(step.removed)}, left ${count(step.left, "token")}`);
  else if (step.changed) parts.push(`changed ${count(step.changed, "score")}`);
  else parts.push("changed nothing");
  if (step.removed && Number.isFinite(step.line) && keepsLikeliest(step)) parts.push(`line at ${percent(step.line)}`);
  return parts.join(" · ");
}

const RULES = {
  top_p: (value, left) =>
    `top_p ${value} keeps the likeliest tokens until together they hold ${percent(value)}: ${count(left, "token")}.`,
  top_k: (value, left) => `top_k ${value} keeps the ${count(left, "likeliest token")}.`,
  min_p: (value, left) =>
    `min_p ${value} keeps tokens at least ${percent(value)} as likely as the likeliest: ${count(left, "token")}.`,
  typical_p: (value, left) =>
    `typical_p ${value} keeps the tokens whose surprise is nearest to what is expected: ${count(left)}.`,
  epsilon_cutoff: (value, left) => `epsilon_cutoff keeps tokens of at least ${percent(value)}: ${count(left)}.`,
};

// Settings that keep the likeliest tokens: what they cut lies below a line.
const KEEP_LIKELIEST = new Set([
  "top_p",
  "top_k",
  "min_p",
  "epsilon_cutoff",
  "eta_cutoff",
  "top_a",
  "top_h",
  "top_n_sigma",
  "mirostat_tau",
  "dola_layers",
]);

export function keepsLikeliest(step) {
  return KEEP_LIKELIEST.has(step.setting);
}

function sayLine(step, value, token) {
  if (!step.removed) return null;
  const cut = (token.top ?? []).find((one) => one.cut_by !== null && isBy(one, step));
  const rule = RULES[step.setting];
  const first =
    rule && typeof value === "number"
      ? rule(value, step.left)
      : `${nameStep(step)} left ${count(step.left, "token")} of ${count(step.left + step.removed)}.`;
  const past = keepsLikeliest(step) ? "is past the line and was cut" : "was cut";
  const where = cut ? ` ${showToken(cut.text)} (${percent(cut.raw)}) ${past}.` : "";
  return first + where;
}

/** Whether an alternative was cut by this processor. */
export function isBy(alternative, step) {
  return alternative.cut_by === step.processor || alternative.cut_by === step.setting;
}

export function nameCut(alternative, token, settings = {}) {
  const step = (token.steps ?? []).find((one) => isBy(alternative, one));
  if (!step) return alternative.cut_by;
  const value = settingValue(step, settings);
  return value === undefined ? nameStep(step) : `${nameStep(step)} ${shortValue(value)}`;
}
