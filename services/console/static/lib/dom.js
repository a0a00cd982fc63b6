// Elements, made without HTML: whatever a model or an agent wrote is set as text, never parsed, and
// its control and direction characters are seen instead of obeyed.

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes, `on…` listeners, `dataset`; children are nodes, text, or lists of them. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

/** Put other children into an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Say something to screen readers, without moving the focus. */
export function announce(text) {
  const place = document.getElementById("announcer");
  if (place.textContent !== text) place.textContent = text;
}
