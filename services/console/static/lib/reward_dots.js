// The rewards of a group on one line: how far apart they are is seen before any number is read.

import { svg } from "./dom.js";
import { fixed } from "./format.js";

const [WIDTH, HEIGHT, EDGE] = [120, 18, 9];

/** A dot for each reward, between the least and the largest; the more rows have it, the larger. */
export function rewardDots(rows, low = null, high = null) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null && reward !== undefined);
  if (!rewards.length) return null;
  const least = Math.min(low ?? 0, ...rewards);
  const largest = Math.max(high ?? 1, ...rewards);
  const at = (reward) => EDGE + ((WIDTH - 2 * EDGE) * (reward - least)) / (largest - least || 1);
  const label = `Rewards ${rewards.map((reward) => fixed(reward)).join(", ")}`;
  return svg("svg", { class: "dots", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": label },
    svg("line", { class: "axis", x1: EDGE, x2: WIDTH - EDGE, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
    [...countsOf(rewards)].map(([reward, count]) => svg("circle", { class: "dot", cx: at(reward), cy: HEIGHT / 2, r: Math.min(8, 2 + 1.6 * Math.sqrt(count)) })));
}

function countsOf(rewards) {
  const counts = new Map();
  for (const reward of rewards) counts.set(reward, (counts.get(reward) ?? 0) + 1);
  return counts;
}
