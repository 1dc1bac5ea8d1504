// Who did what when: one lane each for the learner, relays, workers and validators. Bars carry the version they belong to.
// What a node receives is its own bar in a relay's lane, and a thin one below the work of others.

import { h, replace, svg } from "./dom.js";
import { brief, bytes, clock, duration, linear } from "./figures.js";
import { ask, isReport } from "./run.js";

const EVERY_MS = 2500;
const LANE = 32; // pixels, where there are many
const FEW = 8; // lanes that get more room
const LEFT = 104;
const SPANS = [30, 60, 120, 300, 900, 3600];

export class Timeline {
  constructor(run) {
    this.run = run;
    this.span = 60;
    this.end = null; // null: now
    this.plot = h("div", { class: "plot time", tabindex: "0", role: "region", "aria-label": "Timeline; left and right arrows move, plus and minus change the span", onkeydown: (event) => this.key(event) });
    this.told = h("p", { class: "muted", role: "status" }, "Choose a bar to see what it is.");
    this.spans = SPANS.map((span) => h("button", { type: "button", class: "quiet", onclick: () => this.zoom(span) }, duration(span)));
    const move = (words, share, label) => h("button", { type: "button", class: "quiet", "aria-label": label, onclick: () => this.move(share) }, words);
    this.root = h("div", { class: "page" }, h("h1", { class: "unseen" }, "Timeline"), h("section", { class: "card" },
      h("header", {}, h("h2", {}, "Who does what while the learner trains")),
      h("p", { class: "muted" }, "Workers generate with one version while the learner trains the next; validators check in between. The number in a bar is a policy version; the thin bars below are its way to each node."),
      h("div", { class: "bar" }, move("‹", -0.5, "Earlier"), move("›", 0.5, "Later"), h("button", { type: "button", class: "quiet", onclick: () => { this.end = null; this.look(true); } }, "Newest"), this.spans, legend()),
      this.plot, this.told));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  start() {
    if (!this.found) this.span = SPANS.find((span) => span >= 0.3 * Math.min(this.run.overview.elapsed_s, 600)) ?? 300;
    this.look(true);
    this.timer = setInterval(() => this.look(false), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async look(asked) {
    if (!asked && (document.hidden || this.end !== null || this.run.overview.state !== "running")) return;
    const found = await ask(`/api/timeline?last=${this.span}${this.end === null ? "" : `&to=${this.end}`}`);
    const to_s = this.end ?? found.now_s; // a report has one answer, the whole run
    this.found = isReport ? { ...found, from_s: to_s - this.span, to_s } : found;
    this.draw();
  }

  zoom(span) {
    this.span = span;
    this.look(true);
  }

  move(share) {
    if (!this.found) return;
    const { begun_s, now_s } = this.found;
    this.end = Math.max((this.end ?? now_s) + share * this.span, begun_s + this.span);
    if (this.end >= now_s) this.end = null;
    this.look(true);
  }

  key(event) {
    const at = SPANS.indexOf(this.span);
    if (event.key === "ArrowLeft") this.move(-0.25);
    else if (event.key === "ArrowRight") this.move(0.25);
    else if (event.key === "+" && at > 0) this.zoom(SPANS[at - 1]);
    else if (event.key === "-" && at < SPANS.length - 1) this.zoom(SPANS[at + 1]);
    else return;
    event.preventDefault();
  }

  draw() {
    for (const [index, button] of this.spans.entries()) button.setAttribute("aria-pressed", SPANS[index] === this.span);
    const { found } = this;
    const width = this.plot.clientWidth;
    if (!found || !width) return;
    const left = width < 500 ? 74 : LEFT;
    const tall = found.lanes.length > FEW ? LANE : 48;
    const height = found.lanes.length * tall + 48;
    const x = linear([found.from_s, found.to_s], [left, width - 8]);
    const parts = [];
    let labelled = Infinity;
    for (const { version, at_s } of found.published) {
      const at = x(at_s);
      if (at < left || at > width - 8) continue;
      parts.push(svg("path", { class: "published", d: `M${at.toFixed(1)} 16V${height - 24}` }));
      if (labelled - at < 26) continue;
      labelled = at;
      parts.push(svg("text", { x: at, y: 11, "text-anchor": "middle" }, `v${version}`));
    }
    found.lanes.forEach((lane, row) => {
      const y = 22 + row * tall;
      parts.push(svg("text", { class: "lane", x: 0, y: y + (tall - 10) / 2 + 4 }, lane.name.length > 15 ? `${lane.name.slice(0, 14)}…` : lane.name));
      parts.push(svg("path", { class: "grid", d: `M${left} ${y + tall - 5.5}H${width}` }));
      for (const bar of lane.bars) parts.push(...this.queued(bar, x, y, left, tall - 11));
      for (const bar of lane.bars) parts.push(...this.bar(bar, lane, x, y, left, width, tall - 11));
    });
    const marks = width < 500 ? 2 : 4;
    for (let index = 0; index <= marks; index += 1) {
      const at = found.from_s + ((found.to_s - found.from_s) * index) / marks;
      parts.push(svg("text", { x: x(at), y: height - 6, "text-anchor": index === 0 ? "start" : index === marks ? "end" : "middle" }, clock(at)));
    }
    this.plot.style.height = `${height}px`;
    replace(this.plot, svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Lanes of learner, workers and validators" }, parts));
    if (found.cut_s) this.told.textContent = `Too much happened to show all of it: complete from ${clock(found.cut_s)}.`;
  }

  queued(bar, x, y, left, tall) {
    const from = Math.max(x(bar.queued_s ?? bar.from_s), left);
    const wide = x(bar.from_s) - from;
    return wide > 1 ? [svg("rect", { class: "b-queued", x: from, y: y + tall / 2 - 1, width: wide, height: 4 })] : [];
  }

  bar(bar, lane, x, y, left, width, tall) {
    const from = Math.max(x(bar.from_s), left);
    const to = Math.min(x(bar.to_s), width - 8);
    if (to < left || from > width - 8) return [];
    const wide = Math.max(to - from, 1);
    const bad = bar.state === "rejected";
    const kind = bar.kind === "generate" ? (bad ? "b-bad" : bar.state === "stale" || bar.state === "expired" ? "b-lost" : `b-generate${bar.version % 2 ? " odd" : ""}`) : bad ? "b-bad" : `b-${bar.kind}`;
    const words = sentence(bar, lane);
    const tell = () => { this.told.textContent = words; };
    const parts = [];
    const below = bar.kind === "receive" && lane.role !== "relay";
    const thin = below || bar.kind === "wait";
    parts.push(svg("rect", { class: kind, x: from + 0.5, y: below ? y + tall + 1 : thin ? y + tall / 2 - 2 : y + 1, width: Math.max(wide - 1, 0.8), height: below ? 4 : thin ? 6 : tall, rx: 3, tabindex: wide > 6 ? "0" : null, role: "img", "aria-label": words, onpointerenter: tell, onfocus: tell }, svg("title", {}, words)));
    if (!thin && wide > 22) parts.push(svg("text", { class: `in${bar.kind === "generate" && !bad ? " dark" : ""}`, x: from + wide / 2, y: y + tall / 2 + 5, "text-anchor": "middle" }, String(bar.version)));
    return parts;
  }
}

function sentence(bar, lane) {
  const took = duration(bar.to_s - bar.from_s) === "0s" ? `${brief(bar.to_s - bar.from_s)} s` : duration(bar.to_s - bar.from_s);
  const when = `${clock(bar.from_s)}, ${took}`;
  if (bar.kind === "wait") return `${lane.name} waits for the batch of step ${bar.step + 1} (${when}).`;
  if (bar.kind === "train") return `${lane.name} trains step ${bar.step + 1} and makes version ${bar.version} (${when}).`;
  if (bar.kind === "receive") return `${lane.name} receives ${bytes(bar.bytes)} of version ${bar.version} (${when}).`;
  const what = `submission #${bar.submission} of ${bar.groups} groups for step ${bar.step + 1}`;
  const end = bar.reason ? `: rejected, ${bar.reason}` : bar.state === "accepted" ? ": accepted" : "";
  if (bar.kind === "generate") return `${lane.name} generates ${what} with version ${bar.version} (${when})${end}.`;
  return `${lane.name} checks ${what} of ${bar.worker}, version ${bar.version} (${when})${end}.`;
}

function legend() {
  const entry = (words, colour) => h("span", {}, h("i", { class: `box fill ${colour}` }), words);
  return h("div", { class: "legend" }, entry("trains", "c-accent"), entry("generates", "c-soft"), entry("checks", "c-muted"), entry("receives weights", "c-warn"), entry("waits", "c-idle"), entry("rejected", "c-bad"));
}
