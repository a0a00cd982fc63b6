// What a token's colour says. Each way gives a class for a token and the entries of its legend.

const DIFFS = [0.02, 0.1, 0.5, 1.5];
const ADVANTAGES = [0.05, 0.5, 1, 2];
const LOGPROBS = [0.1, 0.5, 1.2, 2.5, 5];

function known(value) {
  return value !== null && value !== undefined;
}

function level(size, limits) {
  return limits.filter((limit) => size >= limit).length;
}

function diverging(value, limits) {
  if (!known(value)) return "none";
  const steps = level(Math.abs(value), limits);
  return steps === 0 ? "zero" : `${value < 0 ? "minus" : "plus"}-${steps}`;
}

function divergingLegend(limits) {
  const [least, largest] = [limits[0], limits.at(-1)];
  return [["minus-4", `≤ \u2212${largest}`], ["minus-2", "below 0"], ["zero", `within ±${least}`], ["plus-2", "above 0"], ["plus-4", `≥ ${largest}`], ["none", "no value"]];
}

function ofKinds(values) {
  const kinds = [...new Set(values.filter(known))].sort((one, other) => (one < other ? -1 : 1));
  return (value) => (known(value) ? `kind-${kinds.indexOf(value) % 6}` : "none");
}

function kindLegend(values, name) {
  const kinds = [...new Set(values.filter(known))].sort((one, other) => (one < other ? -1 : 1));
  return [...kinds.map((kind, index) => [`kind-${index % 6}`, name(kind)]), ["none", "not sampled"]];
}

/** Train minus rollout log-prob of token `index`, or null. */
export function difference(window, index) {
  const [own, sampled] = [window.train_logprob?.[index], window.logprob?.[index]];
  return known(own) && known(sampled) ? own - sampled : null;
}

/** `{ title, has(window), classOf(window) → index → class, legend(window) }` by name. */
export const COLOURS = {
  origin: {
    title: "Who wrote it",
    has: () => true,
    classOf: (window) => (index) => (window.origin[index] === "p" ? "kind-0" : "none"),
    legend: () => [["kind-0", "policy"], ["none", "environment"]],
  },
  trained: {
    title: "Trained",
    has: (window) => window.trained?.some(known),
    classOf: (window) => (index) => (window.trained[index] ? "plus-2" : "none"),
    legend: () => [["plus-2", "trained"], ["none", "not trained"]],
  },
  logprob: {
    title: "Log-prob",
    has: (window) => Boolean(window.logprob),
    classOf: (window) => (index) => (known(window.logprob[index]) ? `heat-${level(-window.logprob[index], LOGPROBS)}` : "none"),
    legend: () => [["heat-0", "likely (> \u22120.1)"], ["heat-2", "\u22120.5 to \u22121.2"], ["heat-5", "unlikely (≤ \u22125)"], ["none", "not sampled"]],
  },
  gap: {
    title: "Train − rollout",
    has: (window) => window.train_logprob?.some(known),
    classOf: (window) => (index) => diverging(difference(window, index), DIFFS),
    legend: () => divergingLegend(DIFFS),
  },
  advantage: {
    title: "Advantage",
    has: (window) => window.advantage?.some(known),
    classOf: (window) => (index) => diverging(window.advantage[index], ADVANTAGES),
    legend: () => divergingLegend(ADVANTAGES),
  },
  version: {
    title: "Weight version",
    has: (window) => window.version?.some(known),
    classOf: (window) => {
      const classOf = ofKinds(window.version);
      return (index) => classOf(window.version[index]);
    },
    legend: (window) => kindLegend(window.version, (version) => `v${version}`),
  },
  server: {
    title: "Server",
    has: (window) => window.server?.some((server) => server),
    classOf: (window) => {
      const classOf = ofKinds(window.server.map((server) => server || null));
      return (index) => classOf(window.server[index] || null);
    },
    legend: (window) => kindLegend(window.server.map((server) => server || null), String),
  },
};
