// A run: one request and everything that the server said about it. Events are folded in, views read it.

export function newRun(id, request, { parent = null, prefix = [], label = "" } = {}) {
  return {
    id,
    label, // of the settings, for people
    request, // the body that was sent
    parent, // {run, index, text}: where it branched off, or null
    base: prefix.length, // tokens that were there before this run wrote any
    status: "running", // then done, stopped, lost or failed
    start: null,
    tokens: [...prefix],
    rounds: [], // of drafts
    beams: [], // steps of a beam method
    end: null,
    error: null,
  };
}

/** Fold one event into a run. Events of types that are not known are left out: a newer server may send them. */
export function applyEvent(run, event) {
  switch (event.type) {
    case "start":
      run.start = event;
      break;
    case "token":
      run.tokens.push(event);
      break;
    case "draft":
      run.rounds.push(event);
      break;
    case "beams":
      run.beams.push(event);
      break;
    case "end":
      run.end = event;
      run.status = "done";
      break;
    case "error":
      run.error = event.message;
      run.status = "failed";
      break;
  }
}

export function isBeamRun(run) {
  return run.beams.length > 0;
}

/** The tokens to show: those written, or those of the best beam so far. */
export function readTokens(run) {
  if (!isBeamRun(run)) return run.tokens;
  return [...run.tokens.slice(0, run.base), ...readBeam(run, bestPath(run))];
}

/** The best beam's place among the live ones at each step, as far as it is known. */
export function bestPath(run) {
  const first = run.end?.sequences?.[0];
  if (first?.beams?.length) return first.beams.filter((place) => place !== null);
  const last = run.beams.length - 1;
  if (last < 0) return [];
  return pathTo(run, last, indexOfBest(run.beams[last].live));
}

/** Where the best text ended among those that ended: {step, place, node}; null if it went on to the last step. */
export function endOfBest(run) {
  const first = run.end?.sequences?.[0];
  const step = first?.beams?.indexOf(null) ?? -1;
  if (step < 0) return null;
  const parent = step ? first.beams[step - 1] : null;
  const place = (run.beams[step]?.ended ?? []).findIndex(
    (one) => one.parent === parent && one.id === first.ids[run.base + step],
  );
  return place < 0 ? null : { step, place, node: run.beams[step].ended[place] };
}

export function indexOfBest(live) {
  let best = 0;
  live.forEach((one, place) => {
    if ((one.score ?? one.sum_logprob) > (live[best].score ?? live[best].sum_logprob)) best = place;
  });
  return best;
}

/** The places that lead to a live beam of a step. */
export function pathTo(run, step, place) {
  const path = [];
  for (let at = step; at >= 0 && place >= 0; at -= 1) {
    path[at] = place;
    place = run.beams[at].live[place]?.parent ?? -1;
  }
  return path;
}

function readBeam(run, path) {
  const tokens = [];
  let before = 0;
  path.forEach((place, step) => {
    const node = run.beams[step]?.live[place]; // none at the step where it ended
    if (node === undefined) return;
    tokens.push(asToken(run, step, node, before));
    before = node.sum_logprob;
  });
  const ended = endOfBest(run);
  if (ended) tokens.push(asToken(run, ended.step, ended.node, before));
  return tokens;
}

/** A beam's token in the form of the others: its alternatives are its siblings. */
function asToken(run, step, node, before) {
  const { live, ended = [] } = run.beams[step];
  const siblings = [...live, ...ended].filter((one) => one.parent === node.parent && one !== node);
  const share = (one) => (one.sum_logprob === undefined ? null : Math.exp(one.sum_logprob - before));
  return {
    index: run.base + step,
    id: node.id,
    text: node.text,
    delta: node.text,
    logprob: node.sum_logprob === undefined ? null : node.sum_logprob - before,
    raw_logprob: node.raw_logprob ?? null, // the model's own, before the processors
    rank: null,
    ms: run.beams[step].ms,
    beam: { step, score: node.score, progress: node.progress ?? null, group: node.group },
    top: [node, ...siblings].map((one) => ({ id: one.id, text: one.text, p: share(one), raw: null, cut_by: null })),
    steps: [],
  };
}

export function tokenIds(run) {
  return readTokens(run).map((token) => token.id);
}

/** The sum of the model's own log-probabilities of what this run wrote, and how many tokens that were. */
export function totalLogprob(run) {
  const written = readTokens(run).slice(run.base);
  const values = written.map((token) => token.raw_logprob ?? token.logprob).filter((value) => Number.isFinite(value));
  return { total: values.reduce((sum, value) => sum + value, 0), num: values.length };
}

export function plainText(run) {
  if (run.end?.text !== undefined && run.base === 0) return run.end.text;
  return readTokens(run)
    .map((token) => token.delta ?? token.text)
    .join("");
}
