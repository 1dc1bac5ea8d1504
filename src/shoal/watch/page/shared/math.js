// Formulas by KaTeX as MathML, which browsers draw themselves: no fonts, no styles. It is loaded with the first formula.

import { h } from "./dom.js";

let katex = null;
let loading = null;

export function math(text, display) {
  const element = h(display ? "div.math" : "span.math", {}, text);
  if (katex) draw(element, text, display);
  else (loading ??= load()).then(() => draw(element, text, display), () => {}); // the source stays readable
  return element;
}

async function load() {
  await import("./katex.min.js");
  katex = globalThis.katex;
}

function draw(element, text, display) {
  katex.render(text, element, { displayMode: display, output: "mathml", throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 });
}
