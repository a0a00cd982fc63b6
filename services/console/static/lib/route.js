// The hash is the view: `#/r/RUN/rollouts?failure=TIMEOUT` shows the same view in every browser.

/** `{ run, screen, id, query }` of the hash. */
export function parseHash(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (parts[0] !== "r" || parts.length < 2) return { run: null, screen: "runs", id: null, query };
  return { run: parts[1], screen: parts[2] ?? "overview", id: parts[3] ?? null, query };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** A hash link to a screen of a run. */
export function link(run, screen, id = null, query = {}) {
  if (run === null) return `#/runs${searchOf(query)}`;
  const parts = ["r", run, screen, ...(id === null ? [] : [id])];
  return `#/${parts.map(encodeURIComponent).join("/")}${searchOf(query)}`;
}

function searchOf(query) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}
