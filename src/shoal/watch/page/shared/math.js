// Render formulas with KaTeX as MathML, which browsers draw without fonts or styles. KaTeX is loaded for the first formula.

import { h } from "./dom.js";

let katex = null;
let loading = null;

export function math(text, display) {
  const element = h(display ? "div.math" : "span.math", {}, text);
  if (katex) draw(element, text, display);
  else (loading ??= load()).then(() => draw(element, text, display), () => {}); // on failure the source stays readable
  return element;
}

async function load() {
  await import("./katex.min.js");
  katex = globalThis.katex;
}

function draw(element, text, display) {
  katex.render(text, element, { displayMode: display, output: "mathml", throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 });
}
