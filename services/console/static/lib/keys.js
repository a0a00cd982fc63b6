// The keyboard: `?` shows what every key does on the present screen.

import { h, fill } from "./dom.js";

const BOUND = new Map();

/** Bind a key until the screen is left (`signal`); then what was bound before has it again. */
export function bindKey(key, about, act, signal = null) {
  const bound = { about, act };
  BOUND.set(key, [...(BOUND.get(key) ?? []), bound]);
  signal?.addEventListener("abort", () => BOUND.set(key, BOUND.get(key).filter((one) => one !== bound)));
}

function boundTo(key) {
  return BOUND.get(key)?.at(-1);
}

/** Listen to the whole page. */
export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const bound = boundTo(event.key);
    if (!bound) return;
    event.preventDefault();
    bound.act(event);
  });
}

function isTyping(target) {
  if (target.matches("textarea, select, [contenteditable]")) return true;
  return target.matches("input") && !["checkbox", "radio", "range", "button"].includes(target.type);
}

/** Move the focus among the links `[data-row]` below `root`, by one. */
export function moveRow(root, by) {
  const rows = [...root.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  rows[next].focus({ preventScroll: true });
  rows[next].scrollIntoView({ block: "nearest" });
}

/** `j` and `k` move through the rows of a screen. */
export function bindRows(root, signal) {
  bindKey("j", "next row", () => moveRow(root, 1), signal);
  bindKey("k", "row before", () => moveRow(root, -1), signal);
}

/** The dialog that lists the keys. */
export function showHelp() {
  const bound = [...BOUND.keys()].filter(boundTo);
  const keys = bound.map((key) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, boundTo(key).about)));
  const dialog = document.getElementById("help") ?? document.body.appendChild(h("dialog", { id: "help", class: "help", "aria-labelledby": "help-title" }));
  fill(
    dialog,
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "keys" }, keys, h("div", {}, h("dt", {}, h("kbd", {}, "Enter")), h("dd", {}, "open the row"))),
    h("form", { method: "dialog" }, h("button", { class: "button", autofocus: true }, "Close")),
  );
  dialog.showModal();
}
