// What stays around every screen: runs, screens, the state of the stream, light or dark.

import { isBundle } from "./lib/api.js";
import { fill, h } from "./lib/dom.js";
import { showHelp } from "./lib/keys.js";
import { select } from "./lib/parts.js";
import { link } from "./lib/route.js";

export const TITLES = { runs: "Runs", overview: "Overview", curves: "Curves", steps: "Steps", rollouts: "Rollouts", diff: "Compare", nodes: "Nodes" };
const OF_A_RUN = ["overview", "curves", "steps", "rollouts", "nodes"];
const LIVE = { live: "Live", offline: "Connecting…", still: "" };

/** The head of the page. */
export class Shell {
  constructor(place) {
    this.place = place;
    this.liveMark = h("span", { class: "live", role: "status" });
  }

  /** Draw it anew, unless it would look the same: who has the focus in it keeps it. */
  show(view, runs) {
    const key = JSON.stringify([view.run, view.screen, runs.map((run) => [run.id, run.name])]);
    if (key === this.key) return;
    this.key = key;
    fill(
      this.place,
      h("a", { class: "brand", href: "#/runs", "aria-label": "seamflow, all runs" }, h("img", { src: "static/favicon.svg", alt: "", width: 20, height: 20 }), "seamflow"),
      runs.length ? this.runChoice(view, runs) : null,
      view.run === null ? null : this.screens(view),
      h("div", { class: "tools" }, view.run === null || isBundle() ? null : this.liveMark, themeButton(), helpButton()),
    );
  }

  runChoice(view, runs) {
    const choices = runs.map((run) => [run.id, run.name ?? run.id]);
    if (!runs.some((run) => run.id === view.run)) choices.unshift([view.run ?? "", view.run ?? "choose a run…"]);
    const screen = OF_A_RUN.includes(view.screen) ? view.screen : "overview";
    return h("div", { class: "runchoice" }, select(choices, view.run ?? "", (run) => (location.hash = link(run, screen)), { "aria-label": "Run" }));
  }

  screens(view) {
    const here = view.screen === "diff" ? "rollouts" : view.screen;
    const links = OF_A_RUN.map((name) => h("li", {}, h("a", { href: link(view.run, name), "aria-current": name === here ? "page" : null }, TITLES[name])));
    return h("nav", { "aria-label": "Screens" }, h("ul", {}, links));
  }

  showLive(state) {
    this.liveMark.className = `live live-${state}`;
    fill(this.liveMark, LIVE[state]);
  }
}

function helpButton() {
  return h("button", { class: "icon", "aria-label": "Keys", title: "Keys (?)", onclick: showHelp }, "?");
}

function themeButton() {
  const dark = document.documentElement.dataset.theme === "dark";
  const name = dark ? "Light colours" : "Dark colours";
  return h("button", { class: "icon", "aria-label": name, title: name, onclick: (event) => {
    keepTheme(dark ? "light" : "dark");
    const other = themeButton();
    event.currentTarget.replaceWith(other);
    other.focus();
  } }, dark ? "☀" : "☾");
}

function keepTheme(theme) {
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // A browser that keeps nothing still shows the chosen colours.
  }
  show(theme);
}

function keptTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function show(theme) {
  document.documentElement.dataset.theme = theme;
  window.dispatchEvent(new Event("themechange"));
}

/** The colours that were chosen last; else those of the system, also when it changes. */
export function setTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const update = () => show(keptTheme() ?? (system.matches ? "dark" : "light"));
  system.addEventListener("change", update);
  update();
}
