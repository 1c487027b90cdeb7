// Where the nodes of a beam search stand: a column for each step, children beside their parents, no lines crossing.

export const ROW = 30;
export const BOX = 24;
const GAP = 34;
const LETTER = 7.3;

/** The width of a text in letters; wide scripts take two. */
export function measure(text) {
  let width = 0;
  for (const letter of text)
    width +=
      letter.codePointAt(0) >= 0x1100 &&
      /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f300}-\u{1faff}]/u.test(
        letter,
      )
        ? 2
        : 1;
  return width;
}

/**
 * Put the nodes of one step behind a column: each as close to its parent as its neighbours allow.
 * `before` is the last column (null at the start), `nodes` have {parent, score, label}; `parent` is a place among the
 * live ones of the step before. Returns the column {x, width, boxes}; each box has {node, x, y, width, from}.
 */
export function placeColumn(before, nodes, left) {
  const parents = before === null ? [null] : before.boxes.filter((box) => box.node.isLive);
  const ordered = [];
  for (const parent of parents) {
    const children = nodes.filter((node) => before === null || node.parent === parent.node.place);
    children.sort((a, b) => (b.score ?? 0) - (a.score ?? 0));
    children.forEach((node, at) =>
      ordered.push({ node, from: parent, wanted: (parent?.y ?? 0) + (at - (children.length - 1) / 2) * ROW }),
    );
  }
  // A beam whose parent is not shown stands below the others.
  for (const node of nodes)
    if (!ordered.some((one) => one.node === node))
      ordered.push({ node, from: null, wanted: (ordered.at(-1)?.wanted ?? 0) + ROW });
  const ys = spread(
    ordered.map((one) => one.wanted),
    ROW,
  );
  const width = Math.max(40, ...ordered.map(({ node }) => measure(node.label) * LETTER + 18));
  const boxes = ordered.map(({ node, from }, at) => ({
    node,
    from,
    x: left,
    y: ys[at],
    width: measure(node.label) * LETTER + 18,
  }));
  return { x: left, width, next: left + width + GAP, boxes };
}

/** The places nearest to the wanted ones that keep their order and a gap: isotonic regression by pooling. */
export function spread(wanted, gap) {
  const pools = []; // [mean, count]
  wanted.forEach((value, place) => {
    let mean = value - place * gap;
    let size = 1;
    while (pools.length && pools.at(-1)[0] > mean) {
      const [other, more] = pools.pop();
      mean = (mean * size + other * more) / (size + more);
      size += more;
    }
    pools.push([mean, size]);
  });
  return pools.flatMap(([mean, size]) => Array(size).fill(mean)).map((mean, place) => mean + place * gap);
}
