// Build elements from data. Text is set only as text, so nothing that a model or a user wrote becomes markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button.quiet", { onclick, "aria-label": "Copy" }, "text", child, ...)
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  return fill(element, attributes, children);
}

// The same for SVG elements.
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(host, ...children) {
  host.replaceChildren(...present(children));
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (name === "width%") element.style.width = `${value}%`; // the content security policy forbids style attributes
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

const present = (children) => children.flat(9).filter((child) => child !== null && child !== undefined && child !== false);

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16v4M13.5 6.5l4 4",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  down: "M12 4v11M7 11l5 5 5-5M5 20h14",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  out: "M10 5H5v14h5M14 8l4 4-4 4M18 12H9",
  check: "M5 12.5l4.5 4.5L19 7.5",
  cross: "M6 6l12 12M18 6L6 18",
  shield: "M12 3l7 3v5c0 5-3 8-7 10-4-2-7-5-7-10V6l7-3M9 12l2.2 2.2L15.2 10",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M16.2 16.2L20 20",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}
