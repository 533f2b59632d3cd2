// Elements from plain values. Every string becomes a text node, so nothing that a model or a tool wrote is ever markup.

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]|\p{Cs}/gu;
const SVG = "http://www.w3.org/2000/svg";

/** Return the text with control characters and changes of direction spelled out, as \u202e for example. */
export function visible(text) {
  return String(text).replace(HIDDEN, (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") { for (const [key, own] of Object.entries(value)) node.style.setProperty(key, own); }
    else node.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return node;
}

/** Return an HTML element; a property `onNAME` is a listener, and `vars` has CSS variables. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Return an SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replace the content of a node. The element with the focus keeps it, if its `data-key` is still there. */
export function show(node, ...children) {
  const key = document.activeElement?.dataset?.key;
  const scrolled = [...node.querySelectorAll("[data-scroll]")].map((
    each,
  ) => [each.dataset.scroll, each.scrollTop, each.scrollLeft]);
  node.replaceChildren(...children.flat(Infinity).filter((child) => child instanceof Node));
  for (const [name, top, left] of scrolled) {
    const again = node.querySelector(`[data-scroll="${CSS.escape(name)}"]`);
    if (again) {
      again.scrollTop = top;
      again.scrollLeft = left;
    }
  }
  if (key && document.activeElement === document.body) {
    node.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  }
}

/** Show a note next to the pointer or the focused element; no lines: hide it. */
export function hint(lines, box) {
  const tip = document.getElementById("tooltip");
  tip.hidden = !lines?.length;
  if (tip.hidden) return;
  tip.replaceChildren(...lines.map(([name, value]) => h("div", {}, h("span", { class: "quiet" }, name), " ", value)));
  const { innerWidth, innerHeight } = window;
  const own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 8))}px`;
  tip.style.top = `${
    box.bottom + own.height + 8 > innerHeight ? Math.max(4, box.top - own.height - 6) : box.bottom + 6
  }px`;
}
