// The activity of each node over time, one lane for each node. The number in a bar is its policy version.
// A download is a full bar in the lane of a relay, and a thin bar below the work in the lane of another node.

import { h, replace, svg } from "./dom.js";
import { brief, bytes, clock, duration, linear } from "./figures.js";
import { fetchJson, isReport } from "./run.js";

const EVERY_MS = 2500;
const LANE_PX = 32, TALL_LANE_PX = 48;
const MAX_TALL = 8; // with more lanes than this, each lane is lower
const LEFT_PX = 104, NARROW_LEFT_PX = 74, RIGHT_PX = 8;
const NARROW_PX = 500;
const VERSION_PX = 26; // minimum distance between two version labels
const SPANS_S = [30, 60, 120, 300, 900, 3600];

export class Timeline {
  constructor(run) {
    this.run = run;
    this.span_s = 60;
    this.end_s = null; // null: now
    this.plot = h("div", { class: "plot time", tabindex: "0", role: "region", "aria-label": "Timeline; left and right arrows move, plus and minus change the span", onkeydown: (event) => this.key(event) });
    this.caption = h("p", { class: "muted", role: "status" }, "Select a bar to read its description.");
    this.spanButtons = SPANS_S.map((span_s) => h("button", { type: "button", class: "quiet", onclick: () => this.zoom(span_s) }, duration(span_s)));
    const move = (text, share, label) => h("button", { type: "button", class: "quiet", "aria-label": label, onclick: () => this.move(share) }, text);
    this.root = h("div", { class: "page" }, h("h1", { class: "visually-hidden" }, "Timeline"), h("section", { class: "card" },
      h("header", {}, h("h2", {}, "Who does what while the learner trains")),
      h("p", { class: "muted" }, "Workers generate with one version while the learner trains the next; validators check in between. The number in a bar is a policy version. The thin bars below show downloads of versions."),
      h("div", { class: "bar" }, move("‹", -0.5, "Earlier"), move("›", 0.5, "Later"), h("button", { type: "button", class: "quiet", onclick: () => { this.end_s = null; this.refresh(true); } }, "Newest"), this.spanButtons, legend()),
      this.plot, this.caption));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  start() {
    if (!this.data) this.span_s = SPANS_S.find((span_s) => span_s >= 0.3 * Math.min(this.run.overview.elapsed_s, 600)) ?? 300;
    this.refresh(true);
    this.timer = setInterval(() => this.refresh(false), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async refresh(always) {
    if (!always && (this.waiting || document.hidden || this.end_s !== null || this.run.overview.state !== "running")) return;
    this.waiting = true;
    const to = this.end_s === null ? "" : `&to=${this.end_s}`;
    const data = await fetchJson(`/api/timeline?last=${this.span_s}${to}`).finally(() => (this.waiting = false));
    const to_s = this.end_s ?? data.now_s;
    this.data = isReport ? { ...data, from_s: to_s - this.span_s, to_s } : data; // a report embeds the whole run
    this.draw();
  }

  zoom(span_s) {
    this.span_s = span_s;
    this.refresh(true);
  }

  move(share) {
    if (!this.data) return;
    const { started_s, now_s } = this.data;
    this.end_s = Math.max((this.end_s ?? now_s) + share * this.span_s, started_s + this.span_s);
    if (this.end_s >= now_s) this.end_s = null;
    this.refresh(true);
  }

  key(event) {
    const at = SPANS_S.indexOf(this.span_s);
    if (event.key === "ArrowLeft") this.move(-0.25);
    else if (event.key === "ArrowRight") this.move(0.25);
    else if (event.key === "+" && at > 0) this.zoom(SPANS_S[at - 1]);
    else if (event.key === "-" && at < SPANS_S.length - 1) this.zoom(SPANS_S[at + 1]);
    else return;
    event.preventDefault();
  }

  draw() {
    for (const [index, button] of this.spanButtons.entries()) button.setAttribute("aria-pressed", SPANS_S[index] === this.span_s);
    const { data } = this;
    const width = this.plot.clientWidth;
    if (!data || !width) return;
    const left = width < NARROW_PX ? NARROW_LEFT_PX : LEFT_PX;
    const right = width - RIGHT_PX;
    const laneHeight = data.lanes.length > MAX_TALL ? LANE_PX : TALL_LANE_PX;
    const height = data.lanes.length * laneHeight + 48;
    const x = linear([data.from_s, data.to_s], [left, right]);
    const parts = [];
    let lastLabel = Infinity; // versions are listed newest first
    for (const { version, at_s } of data.published) {
      const at = x(at_s);
      if (at < left || at > right) continue;
      parts.push(svg("path", { class: "published", d: `M${at.toFixed(1)} 16V${height - 24}` }));
      if (lastLabel - at < VERSION_PX) continue;
      lastLabel = at;
      parts.push(svg("text", { x: at, y: 11, "text-anchor": "middle" }, `v${version}`));
    }
    data.lanes.forEach((lane, row) => {
      const y = 22 + row * laneHeight;
      const barHeight = laneHeight - 11;
      parts.push(svg("text", { class: "lane", x: 0, y: y + (laneHeight - 10) / 2 + 4 }, lane.name.length > 15 ? `${lane.name.slice(0, 14)}…` : lane.name));
      parts.push(svg("path", { class: "grid", d: `M${left} ${y + laneHeight - 5.5}H${width}` }));
      for (const bar of lane.bars) parts.push(...queuedBar(bar, x, y, left, barHeight));
      for (const bar of lane.bars) parts.push(...this.bar(bar, lane, x, y, left, right, barHeight));
    });
    const marks = width < NARROW_PX ? 2 : 4;
    for (let index = 0; index <= marks; index += 1) {
      const at = data.from_s + ((data.to_s - data.from_s) * index) / marks;
      parts.push(svg("text", { x: x(at), y: height - 6, "text-anchor": index === 0 ? "start" : index === marks ? "end" : "middle" }, clock(at)));
    }
    this.plot.style.height = `${height}px`;
    replace(this.plot, svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Lanes of learner, workers and validators" }, parts));
    if (data.cut_s) this.caption.textContent = `There are too many submissions to show all; the timeline is complete from ${clock(data.cut_s)}.`;
  }

  bar(bar, lane, x, y, left, right, barHeight) {
    const from = Math.max(x(bar.from_s), left);
    const to = Math.min(x(bar.to_s), right);
    if (to < left || from > right) return [];
    const width = Math.max(to - from, 1);
    const text = describe(bar, lane);
    const show = () => { this.caption.textContent = text; };
    const parts = [];
    const isBelow = bar.kind === "receive" && lane.role !== "relay";
    const isThin = isBelow || bar.kind === "wait";
    parts.push(svg("rect", { class: barClass(bar), x: from + 0.5, y: isBelow ? y + barHeight + 1 : isThin ? y + barHeight / 2 - 2 : y + 1, width: Math.max(width - 1, 0.8), height: isBelow ? 4 : isThin ? 6 : barHeight, rx: 3, tabindex: width > 6 ? "0" : null, role: "img", "aria-label": text, onpointerenter: show, onfocus: show }, svg("title", {}, text)));
    const isDark = bar.kind === "generate" && bar.state !== "rejected";
    if (!isThin && width > 22) parts.push(svg("text", { class: `in${isDark ? " dark" : ""}`, x: from + width / 2, y: y + barHeight / 2 + 5, "text-anchor": "middle" }, String(bar.version)));
    return parts;
  }
}

// The time between the upload and the check of a submission.
function queuedBar(bar, x, y, left, barHeight) {
  const from = Math.max(x(bar.queued_s ?? bar.from_s), left);
  const width = x(bar.from_s) - from;
  return width > 1 ? [svg("rect", { class: "b-queued", x: from, y: y + barHeight / 2 - 1, width, height: 4 })] : [];
}

function barClass({ kind, state, version }) {
  if (state === "rejected") return "b-bad";
  if (kind !== "generate") return `b-${kind}`;
  return state === "stale" || state === "expired" ? "b-lost" : `b-generate${version % 2 ? " odd" : ""}`;
}

function describe(bar, lane) {
  const seconds = bar.to_s - bar.from_s;
  const when = `${clock(bar.from_s)}, ${duration(seconds) === "0s" ? `${brief(seconds)} s` : duration(seconds)}`;
  if (bar.kind === "wait") return `${lane.name} waits for the batch of step ${bar.step + 1} (${when}).`;
  if (bar.kind === "train") return `${lane.name} trains step ${bar.step + 1} and makes version ${bar.version} (${when}).`;
  if (bar.kind === "receive") return `${lane.name} receives ${bytes(bar.bytes)} of version ${bar.version} (${when}).`;
  const what = `submission #${bar.submission} of ${bar.groups} groups for step ${bar.step + 1}`;
  const end = bar.reason ? `: rejected, ${bar.reason}` : bar.state === "accepted" ? ": accepted" : "";
  if (bar.kind === "generate") return `${lane.name} generates ${what} with version ${bar.version} (${when})${end}.`;
  return `${lane.name} checks ${what} of ${bar.worker}, version ${bar.version} (${when})${end}.`;
}

function legend() {
  const entry = (text, color) => h("span", {}, h("i", { class: `box fill ${color}` }), text);
  return h("div", { class: "legend" }, entry("trains", "c-accent"), entry("generates", "c-soft"), entry("checks", "c-muted"), entry("receives weights", "c-warn"), entry("waits", "c-idle"), entry("rejected", "c-bad"));
}
