// Shows the screen that the hash names, and what stays around it.

import { get, isBundle } from "./lib/api.js";
import { announce, fill } from "./lib/dom.js";
import { bindKey, listenToKeys, showHelp } from "./lib/keys.js";
import { LiveRun } from "./lib/live.js";
import { failure } from "./lib/parts.js";
import { link, parseHash } from "./lib/route.js";
import { Shell, setTheme, TITLES } from "./shell.js";
import { showSignIn } from "./sign_in.js";
import { showCurves } from "./screens/curves.js";
import { showDiff } from "./screens/diff.js";
import { showNodes } from "./screens/nodes.js";
import { showOverview } from "./screens/overview.js";
import { showRollouts } from "./screens/rollouts.js";
import { showRuns } from "./screens/runs.js";
import { showStep } from "./screens/step.js";
import { showTranscript } from "./screens/transcript.js";

const SCREENS = { runs: showRuns, overview: showOverview, curves: showCurves, steps: showStep, rollouts: showRollouts, diff: showDiff, nodes: showNodes };
const main = document.getElementById("main");
const shell = new Shell(document.getElementById("shell"));
const live = new LiveRun((state) => shell.showLive(state));
let leaving = new AbortController();
let shown = null;
let runs = [];

function screenOf(view) {
  return view.screen === "rollouts" && view.id !== null ? showTranscript : SCREENS[view.screen];
}

async function show() {
  if (location.hash === shown) return;
  delete main.dataset.view;
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const view = parseHash(location.hash);
  const moved = shown !== null;
  shown = location.hash;
  shell.show(view, runs);
  const listed = guarded(() => listRuns(view, signal));
  if (!location.hash) await listed;
  if (signal.aborted) return;
  if (!location.hash && runs.length === 1) return void location.replace(link(runs[0].id, "overview"));
  await render(view, signal);
  if (signal.aborted) return;
  if (moved) focusTitle();
  main.dataset.view = shown;
}

/** Whether something may still happen in a run. */
function isLive(all, id) {
  return all.some((run) => run.id === id && ["running", "waiting"].includes(run.state));
}

async function render(view, signal) {
  const screen = screenOf(view);
  document.title = `${TITLES[view.screen] ?? "Not found"} · ${view.run ?? "seamflow"}`;
  fill(main);
  window.scrollTo(0, 0);
  if (!screen) return void fill(main, failure({ message: `There is no screen "${view.screen}".`, cure: "Choose one above." }));
  const setQuery = (changes) => replaceQuery(view, changes);
  await guarded(() => screen({ ...view, main, signal, setQuery, live }));
}

/** Put filters and places into the hash, without showing the screen again. */
function replaceQuery(view, changes) {
  Object.assign(view.query, changes);
  const hash = link(view.run, view.screen, view.id, view.query);
  if (main.dataset.view === shown) main.dataset.view = hash;
  shown = hash;
  history.replaceState(null, "", hash);
}

/** The runs to choose from; a screen does not wait for them. */
async function listRuns(view, signal) {
  try {
    ({ runs } = await get(["runs"], {}, { signal }));
  } catch (error) {
    if (location.hash && error.status !== 401) return;
    throw error;
  }
  live.follow(isLive(runs, view.run) ? view.run : null);
  shell.show(view, runs);
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.status === 401 || error.status === 403) showSignIn(main, error);
    else if (error.status === undefined) throw error;
    else if (!main.querySelector(".failure")) fill(main, failure(error));
  }
}

function focusTitle() {
  const title = main.querySelector("h1");
  if (!title || main.contains(document.activeElement)) return;
  title.tabIndex = -1;
  title.focus({ preventScroll: true });
  announce(title.textContent);
}

setTheme();
listenToKeys();
bindKey("?", "show the keys", showHelp);
if (!isBundle()) bindKey("/", "search in rollouts", () => {
  const { run } = parseHash(location.hash);
  if (run !== null) location.hash = link(run, "rollouts", null, { find: "1" });
});
window.addEventListener("hashchange", show);
show();
