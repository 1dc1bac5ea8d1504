// The validators' queue, why submissions were rejected, and the ledger's newest entries.

import { el, replace } from "./elements.js";
import { brief, clock, count } from "./figures.js";
import { ask } from "./run.js";

const EVERY_MS = 3000;
const KINDS = ["", "accepted", "rejected", "slashed", "registered", "policy", "batch", "trained", "credited", "forfeited", "witnessed", "started", "sealed"];
const STATES = [["open", "being generated"], ["uploaded", "waiting"], ["validating", "being checked"], ["accepted", "accepted"], ["rejected", "rejected"], ["expired", "missed"], ["stale", "too late"]];

export class Validation {
  constructor(run) {
    this.run = run;
    this.kind = "";
    this.stats = el("div", { class: "stats" });
    this.queue = el("div", { class: "scroll" });
    this.reasons = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rejections" });
    this.feed = el("ul", { class: "feed" });
    this.more = el("button", { type: "button", class: "quiet", onclick: () => this.older() }, "Older entries");
    const kinds = el("select", { onchange: (event) => { this.kind = event.target.value; this.entries = []; this.look(true); } }, KINDS.map((kind) => el("option", { value: kind }, kind || "all kinds")));
    this.root = el("div", { class: "page two" }, el("h1", { class: "unseen" }, "Validation"),
      el("div", { class: "page" },
        el("section", { class: "card" }, el("header", {}, el("h2", {}, "Submissions")), this.stats, this.queue),
        el("section", { class: "card" }, el("header", {}, el("h2", {}, "Why work was rejected")), this.reasons)),
      el("section", { class: "card" }, el("header", {}, el("h2", {}, "Ledger"), el("label", { class: "figure" }, el("span", { class: "unseen" }, "Kind of entry"), kinds)), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ledger entries" }, this.feed, this.more)));
    this.entries = [];
  }

  start() {
    this.look(true);
    this.timer = setInterval(() => this.look(false), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async look(first) {
    if (!first && (document.hidden || this.run.overview.state !== "running")) return;
    this.found = await ask("/api/validation");
    const news = (await ask(`/api/ledger?kind=${this.kind}`)).entries;
    const newest = this.entries[0]?.seq ?? -1;
    this.entries = [...news.filter((entry) => entry.seq > newest), ...this.entries];
    this.draw();
  }

  async older() {
    const before = this.entries[this.entries.length - 1]?.seq;
    if (before === undefined) return;
    const found = (await ask(`/api/ledger?kind=${this.kind}&before=${before}`)).entries;
    this.entries.push(...found);
    this.draw();
    if (!found.length) this.more.hidden = true;
  }

  draw() {
    const { states, wait_s, queue, rejected } = this.found;
    const shown = STATES.filter(([state]) => states[state]);
    const waits = wait_s.median === null ? [] : [[`${brief(wait_s.median)} s`, "upload to verdict, median"], [`${brief(wait_s.p95)} s`, "95th percentile"]];
    replace(this.stats, [...shown.map(([state, words]) => [count(states[state]), words]), ...waits].map(([value, words]) => el("div", {}, el("b", {}, value), el("span", {}, words))));
    const now = this.run.overview.state === "running";
    replace(this.queue, queue.length ? el("table", {}, el("thead", {}, el("tr", {}, ["Submission", "Worker", "Groups", "Version", "State", "By", "Uploaded"].map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, queue.map((row) => el("tr", {}, el("td", {}, `#${row.submission}`), el("td", {}, row.worker), el("td", {}, row.groups), el("td", {}, row.version), el("td", {}, row.state), el("td", {}, row.validator ?? "–"), el("td", {}, clock(row.uploaded_s)))))) : el("p", { class: "muted" }, now ? "Nothing waits for a verdict." : "Nothing is left to check."));
    replace(this.reasons, rejected.length ? rejected.map(rejection) : el("p", { class: "muted" }, "Nothing was rejected."));
    replace(this.feed, this.entries.map((entry) => el("li", { class: entry.kind === "slashed" || entry.kind === "rejected" ? "bad" : null }, el("time", {}, clock(entry.time_s)), el("span", {}, `${entry.text} `, entry.submission ? el("a", { href: `#rollouts/${entry.submission}` }, "Show") : null))));
  }
}

function rejection(row) {
  return el("div", { class: "reason" }, el("span", { class: `pill ${row.hard ? "bad" : "warn"}` }, row.reason), el("span", { class: "what" }, `${row.worker}, submission `, el("a", { href: `#rollouts/${row.submission}` }, `#${row.submission}`)), el("small", {}, `${clock(row.judged_s)} · step ${row.step + 1}`), el("p", {}, row.words), el("p", { class: "muted" }, row.detail));
}
