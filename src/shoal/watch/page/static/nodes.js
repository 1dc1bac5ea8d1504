// The table of nodes, and how weights spread.

import { h, replace } from "./dom.js";
import { brief, bytes, count, duration, ellipsize, percent } from "./figures.js";
import { fetchJson } from "./run.js";

const EVERY_MS = 3000;
const MAX_ROWS = 200;
const MAX_NAME = 32; // characters
const OPTIONAL = ["memory"]; // columns that are hidden if no node reports them
const ofWorker = (write) => (node) => (node.role === "worker" ? write(node) : "–");
const COLUMNS = [
  ["name", "Node", (node) => h("span", { title: node.name }, h("i", { class: `mark ${node.tone}`, "aria-hidden": "true" }), ` ${ellipsize(node.name, MAX_NAME)}`)],
  ["role", "Role", (node) => node.role],
  ["condition", "State", (node) => h("span", { title: node.why }, node.tone === "bad" || node.tone === "warn" ? h("span", { class: `pill ${node.tone}` }, node.condition) : node.condition)],
  ["version", "Version", (node) => node.version ?? "–", "n"],
  ["behind", "Behind", (node) => node.behind ?? "–", "n"],
  ["speed", "Tokens/s", (node) => (node.speed ? count(node.speed) : "–"), "n"],
  ["busy", "Busy", (node) => percent(node.busy, 0), "n"],
  ["accepted", "Accepted", ofWorker((node) => count(node.accepted)), "n"],
  ["rejected", "Rejected", ofWorker((node) => count(node.rejected)), "n"],
  ["missed", "Missed", ofWorker((node) => count(node.missed)), "n"],
  ["credited", "Credited", ofWorker((node) => count(node.credited)), "n"],
  ["streak", "Checks passed in a row", ofWorker((node) => `${count(node.streak)} of ${count(node.checks)}`), "n"],
  ["evidence", "Evidence against", ofWorker((node) => (node.limit ? `${brief(Math.max(node.evidence, 0))} of ${brief(node.limit)}` : "–")), "n"],
  ["seen_s", "Seen", (node) => `${duration(node.seen_s)} ago`, "n"],
  ["memory", "Memory", (node) => bytes(node.memory), "n"],
  ["doing", "Doing (self-reported)", (node) => h("span", { class: "muted" }, node.doing), "wrap"],
];

export class Nodes {
  constructor(run) {
    this.run = run;
    this.sortKey = null;
    this.descending = false;
    this.query = "";
    const search = h("input", { type: "search", placeholder: "name, role or state", oninput: (event) => { this.query = event.target.value.toLowerCase(); this.draw(); } });
    this.note = h("span", { class: "muted" });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of nodes" });
    this.tree = h("div", { class: "scroll" });
    this.root = h("div", { class: "page" }, h("h1", { class: "visually-hidden" }, "Nodes"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Nodes"), this.note), h("div", { class: "filters bar" }, h("label", {}, "Find", search)), this.table),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "How weights spread")), h("p", { class: "muted" }, "Each node is below its main sender of the newest version. The last column lists the rate of every sender."), this.tree));
  }

  start() {
    this.refresh();
    this.timer = setInterval(() => this.refresh(), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async refresh() {
    if (document.hidden || (this.data && this.run.overview.state !== "running")) return;
    this.data = await fetchJson("/api/nodes");
    this.draw();
  }

  draw() {
    if (!this.data) return;
    let rows = this.data.nodes.filter((node) => `${node.name} ${node.role} ${node.condition}`.toLowerCase().includes(this.query));
    const { sortKey, descending } = this;
    if (sortKey) rows = [...rows].sort((a, b) => compare(a[sortKey], b[sortKey]) * (descending ? -1 : 1));
    const columns = COLUMNS.filter(([key]) => !OPTIONAL.includes(key) || rows.some((node) => node[key]));
    this.note.textContent = rows.length > MAX_ROWS ? `${MAX_ROWS} of ${rows.length} shown, problems first` : `${rows.length}`;
    const headings = columns.map(([key, title, , align]) => h("th", { class: align, scope: "col", "aria-sort": sortKey === key ? (descending ? "descending" : "ascending") : null }, h("button", { type: "button", onclick: () => this.sort(key) }, title + (sortKey === key ? (descending ? " ↓" : " ↑") : ""))));
    replace(this.table, h("table", {}, h("thead", {}, h("tr", {}, headings)), h("tbody", {}, rows.slice(0, MAX_ROWS).map((node) => h("tr", {}, columns.map(([, , write, align]) => h("td", { class: align }, write(node))))))));
    this.drawTree(this.data.broadcast);
  }

  drawTree({ tree, left_out }) {
    const rows = tree.map((node) => {
      const name = h("td", {}, `${"\u2003".repeat(node.depth)}${node.depth ? "└ " : ""}${ellipsize(node.name, MAX_NAME)}`);
      const senders = node.from.map((sender) => `${sender.name} ${bytes(sender.bytes_per_s)}/s`).join(", ");
      return h("tr", {}, name, h("td", { class: "dim" }, node.role), h("td", { class: "n" }, node.version ?? "–"), h("td", { class: "n" }, node.behind_s === null ? "–" : `${brief(node.behind_s)} s`), h("td", { class: "dim" }, senders));
    });
    const headings = ["Node", "Role", "Version", "Arrived after", "From"].map((title, index) => h("th", { scope: "col", class: index === 2 || index === 3 ? "n" : null }, title));
    replace(this.tree, h("table", {}, h("thead", {}, h("tr", {}, headings)), h("tbody", {}, rows)), left_out ? h("p", { class: "muted" }, `and ${left_out} more that only receive`) : null);
  }

  sort(key) {
    this.descending = this.sortKey === key ? !this.descending : typeof this.data.nodes[0]?.[key] === "number";
    this.sortKey = key;
    this.draw();
  }
}

// Order two values. Unknown values come last in ascending order.
function compare(a, b) {
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : a > b ? 1 : 0;
}
