// Aligning texts token by token: where they part, and which tokens of one are also in the other.

/** How many tokens all lists begin with. */
export function commonStart(lists) {
  if (!lists.length) return 0;
  let same = 0;
  while (lists.every((list) => same < list.length && list[same] === lists[0][same])) same += 1;
  return same;
}

const MOST_CELLS = 4_000_000;

/** For each of `other`, whether it is in a longest common subsequence with `first`. Very long lists: place by place. */
export function findShared(first, other) {
  if (first.length * other.length > MOST_CELLS) return other.map((id, place) => first[place] === id);
  const width = other.length + 1;
  const lengths = new Uint16Array((first.length + 1) * width);
  for (let a = first.length - 1; a >= 0; a -= 1) {
    for (let b = other.length - 1; b >= 0; b -= 1) {
      lengths[a * width + b] =
        first[a] === other[b]
          ? lengths[(a + 1) * width + b + 1] + 1
          : Math.max(lengths[(a + 1) * width + b], lengths[a * width + b + 1]);
    }
  }
  const shared = other.map(() => false);
  for (let a = 0, b = 0; a < first.length && b < other.length;) {
    if (first[a] === other[b]) {
      shared[b] = true;
      a += 1;
      b += 1;
    } else if (lengths[(a + 1) * width + b] >= lengths[a * width + b + 1]) a += 1;
    else b += 1;
  }
  return shared;
}
