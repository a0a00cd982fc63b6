// Text of any length, as text: the beginning at once, more when it is asked for, a searched word marked.

import { h } from "./dom.js";
import { integer, visible } from "./format.js";

const FIRST = 12_000;
const NEXT = 100_000;

/** Text in a block of its own direction; `find` is marked. */
export function textBlock(text, { find = "", className = "text" } = {}) {
  const block = h("div", { class: className, dir: "auto" });
  let shown = 0;
  const button = h("button", { class: "button", onclick: () => more(NEXT) });
  const more = (size) => {
    block.append(...marked(visible(text.slice(shown, shown + size)), find));
    shown = Math.min(text.length, shown + size);
    button.textContent = `Show more (${integer(text.length - shown)} characters left)`;
    button.hidden = shown >= text.length;
  };
  more(FIRST);
  return text.length > FIRST ? h("div", {}, block, button) : block;
}

function marked(text, find) {
  if (!find) return [document.createTextNode(text)];
  const [low, word] = [text.toLowerCase(), find.toLowerCase()];
  const nodes = [];
  let at = 0;
  for (let hit = low.indexOf(word); hit >= 0; hit = low.indexOf(word, at)) {
    nodes.push(document.createTextNode(text.slice(at, hit)), h("mark", {}, text.slice(hit, hit + word.length)));
    at = hit + word.length;
  }
  return [...nodes, document.createTextNode(text.slice(at))];
}
