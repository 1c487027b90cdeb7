// Ways through a beam search: what greedy search would have written, what was returned, and where the two part.

import { bestPath } from "./run.js";

/** The places of greedy's tokens among the live beams, and the step at which it fell out (null if it never did). */
export function greedyPath(run) {
  const path = [];
  let parent = null;
  for (let step = 0; step < run.beams.length; step += 1) {
    const { live, ended = [] } = run.beams[step];
    let best = -1;
    live.forEach((one, place) => {
      const fits = (step === 0 || one.parent === parent) && (one.group ?? 0) === 0;
      if (fits && (best < 0 || one.sum_logprob > live[best].sum_logprob)) best = place;
    });
    if (best < 0) return { path, fellAt: ended.some((one) => one.parent === parent) ? null : step };
    path.push(best);
    parent = best;
  }
  return { path, fellAt: null };
}

/** Where the best beam leaves greedy's path: {step, greedy, best, before}, or null if it never does. */
export function findParting(run) {
  const best = bestPath(run);
  const { path, fellAt } = greedyPath(run);
  for (let step = 0; step < Math.min(best.length, path.length); step += 1) {
    if (best[step] === path[step]) continue;
    const before = step ? run.beams[step - 1].live[best[step - 1]].sum_logprob : 0;
    return { step, greedy: run.beams[step].live[path[step]], best: run.beams[step].live[best[step]], before, fellAt };
  }
  return fellAt !== null && best.length > path.length
    ? {
        step: path.length,
        greedy: null,
        best: run.beams[path.length]?.live[best[path.length]] ?? null,
        before: 0,
        fellAt,
      }
    : null;
}
