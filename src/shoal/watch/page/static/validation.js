// The validators' queue, and why submissions were rejected.

import { h, replace } from "./dom.js";
import { brief, clock, count } from "./figures.js";
import { ask } from "./run.js";

const EVERY_MS = 3000;
const STATES = [["open", "being generated"], ["uploaded", "waiting"], ["validating", "being checked"], ["accepted", "accepted"], ["rejected", "rejected"], ["expired", "missed"], ["stale", "too late"]];

export class Validation {
  constructor(run) {
    this.run = run;
    this.stats = h("div", { class: "stats" });
    this.queue = h("div", { class: "scroll" });
    this.reasons = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rejections" });
    this.root = h("div", { class: "page" }, h("h1", { class: "unseen" }, "Validation"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Submissions")), this.stats, this.queue),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Why work was rejected")), this.reasons));
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
    this.draw();
  }

  draw() {
    const { states, wait_s, queue, rejected } = this.found;
    const shown = STATES.filter(([state]) => states[state]);
    const waits = wait_s.median === null ? [] : [[`${brief(wait_s.median)} s`, "upload to verdict, median"], [`${brief(wait_s.p95)} s`, "95th percentile"]];
    replace(this.stats, [...shown.map(([state, words]) => [count(states[state]), words]), ...waits].map(([value, words]) => h("div", {}, h("b", {}, value), h("span", {}, words))));
    const now = this.run.overview.state === "running";
    replace(this.queue, queue.length ? h("table", {}, h("thead", {}, h("tr", {}, ["Submission", "Worker", "Groups", "Version", "State", "By", "Uploaded"].map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, queue.map((row) => h("tr", {}, h("td", {}, `#${row.submission}`), h("td", {}, row.worker), h("td", {}, row.groups), h("td", {}, row.version), h("td", {}, row.state), h("td", {}, row.validator ?? "–"), h("td", {}, clock(row.uploaded_s)))))) : h("p", { class: "muted" }, now ? "Nothing waits for a verdict." : "Nothing is left to check."));
    replace(this.reasons, rejected.length ? rejected.map(rejection) : h("p", { class: "muted" }, "Nothing was rejected."));
  }
}

function rejection(row) {
  return h("div", { class: "reason" }, h("span", { class: `pill ${row.hard ? "bad" : "warn"}` }, row.reason), h("span", { class: "what" }, `${row.worker}, submission #${row.submission}`), h("small", {}, `${clock(row.judged_s)} · step ${row.step + 1}`), h("p", {}, row.words), h("p", { class: "muted" }, row.detail));
}
