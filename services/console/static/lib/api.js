// The JSON API of the console, or the data of a bundle that was opened without one.

/** A request that failed; `message` says what and why, `cure` what to do. */
export class ApiError extends Error {
  constructor(status, message, cure) {
    super(message);
    this.status = status;
    this.cure = cure;
  }
}

const CACHED = new Map();
const MOST_CACHED = 200;

/** Whether the page shows recorded data only, without a server. */
export function isBundle() {
  return Boolean(globalThis.SEAMFLOW_BUNDLE);
}

/** The parts as a path below `api/`, each encoded; `query` without empty values. */
export function pathOf(parts, query = {}) {
  const path = parts.map(encodeURIComponent).join("/");
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** GET JSON. Raises ApiError; an aborted request raises AbortError. */
export async function get(parts, query = {}, { signal } = {}) {
  if (isBundle()) return bundled(parts, query);
  let response;
  try {
    response = await fetch(`api/${pathOf(parts, query)}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The console does not answer.", "See whether its process still runs, then reload this page.");
  }
  return read(response);
}

async function read(response) {
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const given = body?.error ?? {};
  const message = given.message ?? `The console answered ${response.status} ${response.statusText}.`;
  throw new ApiError(response.status, message, given.cure ?? "Reload this page.");
}

/** The same, kept: for what never changes once it is made, such as a finished rollout. */
export async function getOnce(parts, query = {}, options = {}) {
  const path = pathOf(parts, query);
  if (CACHED.has(path)) return CACHED.get(path);
  const answer = await get(parts, query, options);
  if (CACHED.size >= MOST_CACHED) CACHED.delete(CACHED.keys().next().value);
  CACHED.set(path, answer);
  return answer;
}

function bundled(parts, query) {
  const bundle = globalThis.SEAMFLOW_BUNDLE;
  if (parts.at(-1) === "tokens") return tokensOf(bundle[pathOf(parts, { turn: query.turn })], query);
  const answer = bundle[pathOf(parts, query)] ?? bundle[pathOf(parts)];
  if (answer === undefined) throw notBundled();
  return answer;
}

function tokensOf(whole, { start = 0, count = 1024 }) {
  if (whole === undefined) throw notBundled();
  const cut = (value) => (Array.isArray(value) || typeof value === "string" ? value.slice(start, start + count) : value);
  const part = Object.fromEntries(Object.entries(whole).map(([name, value]) => [name, cut(value)]));
  return { ...part, start, total: whole.total };
}

function notBundled() {
  return new ApiError(404, "This bundle does not have that.", "It holds chosen rollouts only; open the console of the run for the others.");
}
