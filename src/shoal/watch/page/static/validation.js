// The validators' queue, and why submissions were rejected.

import { h, replace } from "./dom.js";
import { brief, clock, count } from "./figures.js";
import { fetchJson } from "./run.js";

const EVERY_MS = 3000;
const STATES = [["open", "being generated"], ["uploaded", "waiting"], ["validating", "being checked"], ["accepted", "accepted"], ["rejected", "rejected"], ["expired", "missed"], ["stale", "too late"]];
const HEADINGS = ["Submission", "Worker", "Groups", "Version", "State", "Validator", "Uploaded"];

export class Validation {
  constructor(run) {
    this.run = run;
    this.stats = h("div", { class: "stats" });
    this.queue = h("div", { class: "scroll" });
    this.reasons = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rejections" });
    this.root = h("div", { class: "page" }, h("h1", { class: "visually-hidden" }, "Validation"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Submissions")), this.stats, this.queue),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Why submissions were rejected")), this.reasons));
  }

  start() {
    this.refresh(true);
    this.timer = setInterval(() => this.refresh(false), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async refresh(always) {
    if (!always && (document.hidden || this.run.overview.state !== "running")) return;
    this.draw(await fetchJson("/api/validation"));
  }

  draw({ states, wait_s, queue, rejected }) {
    const counts = STATES.filter(([state]) => states[state]).map(([state, label]) => [count(states[state]), label]);
    const waits = wait_s.median === null ? [] : [[`${brief(wait_s.median)} s`, "upload to verdict, median"], [`${brief(wait_s.p95)} s`, "95th percentile"]];
    replace(this.stats, [...counts, ...waits].map(([value, label]) => h("div", {}, h("b", {}, value), h("span", {}, label))));
    const rows = queue.map((row) => [`#${row.submission}`, row.worker, row.groups, row.version, row.state, row.validator ?? "–", clock(row.uploaded_s)]);
    const table = h("table", {}, h("thead", {}, h("tr", {}, HEADINGS.map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))));
    const empty = this.run.overview.state === "running" ? "No submission waits for a verdict." : "No submission is left to check.";
    replace(this.queue, queue.length ? table : h("p", { class: "muted" }, empty));
    replace(this.reasons, rejected.length ? rejected.map(rejection) : h("p", { class: "muted" }, "No submission was rejected."));
  }
}

function rejection(row) {
  return h("div", { class: "reason" }, h("span", { class: `pill ${row.hard ? "bad" : "warn"}` }, row.reason), h("span", { class: "what" }, `${row.worker}, submission #${row.submission}`), h("small", {}, `${clock(row.judged_s)} · step ${row.step + 1}`), h("p", {}, row.words), h("p", { class: "muted" }, row.detail));
}
