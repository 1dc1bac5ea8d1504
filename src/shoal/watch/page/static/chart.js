// Charts in SVG. A chart is redrawn when its data or its size changes. Arrow keys, pointer and touch show its values.

import { h, replace, svg } from "./dom.js";
import { bandPath, brief, integerTicks, linear, nearest, path, range, ticks } from "./figures.js";

const MARGIN = { left: 40, right: 10, top: 8, bottom: 20 };
const MINI_MARGIN = { left: 2, right: 6, top: 7, bottom: 7 };

// `set` takes {x, xName, lines: [{name, x, values, class, low, high, write}], dots: [{name, x, values, class}],
// bars: [{name, values, class}], limits: [{value, text}], minHigh, write, mini, summary}. `write` formats a value; `mini` omits
// the axes; `summary` is read to users who do not see the chart.
export class Chart {
  constructor(label) {
    this.host = h("div", { class: "plot" });
    this.tip = h("div", { class: "tip", role: "status" });
    this.tip.hidden = true;
    this.svg = svg("svg", { role: "img", "aria-label": label, tabindex: "0" });
    this.host.append(this.svg, this.tip);
    this.label = label;
    this.index = null; // of the point whose values are shown; null: none
    new ResizeObserver(() => this.draw()).observe(this.host);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.host.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  set(spec) {
    this.spec = spec;
    this.draw();
  }

  draw() {
    const { spec } = this;
    const width = this.host.clientWidth;
    const height = this.host.clientHeight;
    if (!spec || !width || !height) return;
    const empty = !spec.x.length && !(spec.dots || []).some((dots) => dots.x.length);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", spec.summary ? `${this.label}. ${spec.summary}` : this.label);
    if (empty) {
      replace(this.svg, svg("text", { class: "axis", x: width / 2, y: height / 2, "text-anchor": "middle" }, spec.mini ? "" : "nothing yet"));
      return;
    }
    const margin = spec.mini ? MINI_MARGIN : MARGIN;
    const xs = [...spec.x, ...(spec.dots || []).flatMap((dots) => dots.x), ...(spec.lines || []).flatMap((line) => line.x || [])];
    const bars = spec.bars;
    const domain = bars ? [0.5, Math.max(spec.x.length, 8) + 0.5] : [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
    const stacked = bars ? spec.x.map((_, index) => bars.reduce((sum, bar) => sum + (bar.values[index] || 0), 0)) : [];
    const lists = [
      stacked,
      ...(spec.lines || []).map((line) => line.values),
      ...(spec.lines || []).flatMap((line) => (line.high ? [line.low, line.high] : [])),
      ...(spec.dots || []).map((dots) => dots.values),
      (spec.limits || []).map((limit) => limit.value),
    ];
    const extent = range(lists, { minHigh: spec.minHigh ?? 0 });
    const x = linear(domain, [margin.left, width - margin.right]);
    const y = linear(extent, [height - margin.bottom, margin.top]);
    this.scale = { x, y, width, height, margin, domain };
    const parts = [];
    if (!spec.mini) parts.push(...this.axes(extent, x, y, width, height, margin));
    if (bars) parts.push(...this.stack(bars, x, y));
    for (const limit of spec.limits || []) {
      parts.push(svg("path", { class: "line dashed c-faint", d: `M${margin.left} ${y(limit.value).toFixed(1)}H${width - margin.right}` }));
      parts.push(svg("text", { class: "axis", x: width - margin.right, y: y(limit.value) - 5, "text-anchor": "end" }, limit.text));
    }
    for (const line of spec.lines || []) {
      if (line.high) parts.push(svg("path", { class: `band fill ${line.class}`, d: bandPath(line.x || spec.x, line.low, line.high, x, y) }));
      parts.push(svg("path", { class: `line ${line.class}`, d: path(line.x || spec.x, line.values, x, y) }));
    }
    for (const dots of spec.dots || []) {
      dots.x.forEach((at, index) => {
        if (dots.values[index] === null) return;
        parts.push(svg("circle", { class: dots.class, cx: x(at), cy: y(dots.values[index]), r: 4 }));
      });
    }
    this.cross = svg("path", { class: "cross" });
    replace(this.svg, ...parts, this.cross);
    if (this.index !== null) this.show(this.index);
  }

  axes(extent, x, y, width, height, margin) {
    const { spec } = this;
    const write = spec.write || brief;
    const rows = ticks(extent[0], extent[1], 4).map((value) => [
      svg("path", { class: value === 0 ? "base" : "grid", d: `M${margin.left} ${y(value).toFixed(1)}H${width - margin.right}` }),
      svg("text", { class: "axis", x: margin.left - 7, y: y(value) + 3.5, "text-anchor": "end" }, write(value)),
    ]);
    let columns;
    if (spec.bars) {
      const every = Math.max(Math.ceil(spec.x.length / 6), 1);
      columns = spec.x.map((value, index) => [value, index + 1]).filter((_, index) => (index + 1) % every === 0 || spec.x.length < 7);
    } else columns = integerTicks(this.scale.domain[0], this.scale.domain[1], 6).map((value) => [value, value]);
    const below = columns.map(([value, at]) => svg("text", { class: "axis", x: x(at), y: height - 4, "text-anchor": "middle" }, String(value)));
    return [...rows.flat(), ...below];
  }

  stack(bars, x, y) {
    const { spec } = this;
    const slot = Math.max(x(2) - x(1), 1);
    const barWidth = Math.max(Math.min(slot - Math.min(2, slot * 0.2), 26), 0.8);
    const parts = [];
    spec.x.forEach((_, index) => {
      let base = 0;
      for (const { values, class: name } of bars) {
        const value = values[index] || 0;
        if (!value) continue;
        const top = y(base + value);
        parts.push(svg("rect", { class: `fill ${name}`, x: x(index + 1) - barWidth / 2, y: top, width: barWidth, height: Math.max(y(base) - top, 0.6), "stroke-width": 0 }));
        base += value;
      }
    });
    return parts;
  }

  point(px) {
    if (!this.scale || !this.spec.x.length) return;
    const { domain, margin, width } = this.scale;
    const value = domain[0] + ((px - margin.left) / (width - margin.left - margin.right)) * (domain[1] - domain[0]);
    this.show(this.spec.bars ? Math.min(Math.max(Math.round(value) - 1, 0), this.spec.x.length - 1) : nearest(this.spec.x, value));
  }

  key(event) {
    const last = (this.spec?.x.length ?? 0) - 1;
    if (last < 0) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") this.show(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(Math.min(Math.max((this.index ?? last) + moves[event.key], 0), last));
  }

  show(index) {
    this.index = index;
    this.tip.hidden = index === null;
    if (index === null || !this.scale || !this.cross) {
      this.cross?.setAttribute("d", "");
      return;
    }
    const { spec, scale } = this;
    const at = scale.x(spec.bars ? index + 1 : spec.x[index]);
    this.cross.setAttribute("d", `M${at.toFixed(1)} ${scale.margin.top}V${scale.height - scale.margin.bottom}`);
    const series = [...(spec.lines || []), ...(spec.bars || [])].filter(({ name, x }) => name && !x);
    const rows = series.map(({ name, write, values }) => [name, (write || spec.write || brief)(values[index])]);
    for (const dots of spec.dots || []) {
      const position = dots.x.indexOf(spec.x[index]);
      if (position >= 0) rows.push([dots.name, (spec.write || brief)(dots.values[position])]);
    }
    const table = h("table", {}, rows.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, h("b", {}, value)))));
    replace(this.tip, h("div", { class: "muted" }, `${spec.xName || "step"} ${spec.x[index]}`), table);
    const width = this.tip.offsetWidth;
    const left = at + 12 + width > scale.width ? at - 12 - width : at + 12;
    this.tip.style.left = `${Math.max(left, 0)}px`;
  }
}

export function legend(entries) {
  return h("div", { class: "legend" }, entries.map(([name, shape, color]) => h("span", {}, h("i", { class: `${shape} fill ${color}`, "aria-hidden": "true" }), name)));
}
