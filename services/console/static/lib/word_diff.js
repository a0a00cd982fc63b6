// What two texts share: a longest common subsequence of parts, then of words.

const MOST_CELLS = 4_000_000;

/** Pairs `[a, b]` of equal items in order, by `same`; null if the lists are too long to compare. */
export function commonPairs(one, other, same = Object.is) {
  const [rows, columns] = [one.length, other.length];
  if (rows * columns > MOST_CELLS) return null;
  const width = columns + 1;
  const longest = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      longest[i * width + j] = same(one[i], other[j]) ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  return walk(one, other, same, longest, width);
}

function walk(one, other, same, longest, width) {
  const pairs = [];
  let [i, j] = [0, 0];
  while (i < one.length && j < other.length) {
    if (same(one[i], other[j])) pairs.push([i++, j++]);
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return pairs;
}

/** Words with the space after them. */
export function wordsOf(text) {
  return text.match(/^\s+|\S+\s*/g) ?? [];
}

/** `[[text, isShared], …]` for each of two texts. */
export function wordDiff(a, b) {
  const [one, other] = [wordsOf(a), wordsOf(b)];
  const pairs = commonPairs(one.map((word) => word.trim()), other.map((word) => word.trim()));
  if (pairs === null) return null;
  return [runsOf(one, new Set(pairs.map(([i]) => i))), runsOf(other, new Set(pairs.map(([, j]) => j)))];
}

function runsOf(words, shared) {
  const runs = [];
  words.forEach((word, index) => {
    const is = shared.has(index);
    if (runs.at(-1)?.[1] === is) runs.at(-1)[0] += word;
    else runs.push([word, is]);
  });
  return runs;
}

/** Two lists of parts, aligned: `{ a, b, same }`, where a or b may be missing. */
export function alignParts(a, b) {
  const same = (one, other) => one.role === other.role && one.kind === other.kind && one.text === other.text;
  const pairs = [...(commonPairs(a, b, same) ?? []), [a.length, b.length]];
  const rows = [];
  let [i, j] = [0, 0];
  for (const [x, y] of pairs) {
    while (i < x || j < y) rows.push({ a: i < x ? a[i++] : null, b: j < y ? b[j++] : null, same: false });
    if (x < a.length) rows.push({ a: a[i++], b: b[j++], same: true });
  }
  return rows;
}
