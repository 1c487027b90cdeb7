// Ways through a beam search: what greedy search would have written, what was returned, and where the two part.

import { bestPath, endOfBest } from "./run.js";

/** The places of greedy's tokens among the live beams, and the step at which it fell out (null if it never did); where
 * its text ended while beams went on, the `end` that it wrote. */
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
    const mine = ended.filter((one) => (step === 0 || one.parent === parent) && (one.group ?? 0) === 0);
    if (best < 0) return { path, fellAt: mine.length ? null : step };
    const end = mine.reduce((last, one) => (one.sum_logprob > (last?.sum_logprob ?? live[best].sum_logprob) ? one : last), null);
    if (end) return { path, fellAt: null, end };
    path.push(best);
    parent = best;
  }
  return { path, fellAt: null };
}

/** Where the best beam leaves greedy's path: {step, greedy, best, before}, or null if it never does. */
export function findParting(run) {
  const best = bestPath(run);
  const { path, fellAt, end = null } = greedyPath(run);
  const bestEnd = endOfBest(run)?.node ?? null;
  const nodesAt = (step) => ({
    greedy: run.beams[step]?.live[path[step]] ?? (step === path.length ? end : null),
    best: run.beams[step]?.live[best[step]] ?? (step === best.length ? bestEnd : null),
  });
  for (let step = 0; step <= Math.min(best.length, path.length); step += 1) {
    const nodes = nodesAt(step);
    if (nodes.greedy === null || nodes.best === null || nodes.greedy === nodes.best) continue;
    const before = step ? run.beams[step - 1].live[best[step - 1]].sum_logprob : 0;
    return { step, ...nodes, before, fellAt };
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
