// The table of nodes, and how weights spread.

import { h, replace } from "./dom.js";
import { brief, bytes, count, duration, percent } from "./figures.js";
import { ask } from "./run.js";

const EVERY_MS = 3000;
const PAGE = 200;
const WHERE_KNOWN = ["memory"];
const COLUMNS = [
  ["name", "Node", (node) => h("span", {}, h("i", { class: `mark ${node.tone}`, "aria-hidden": "true" }), ` ${node.name}`)],
  ["role", "Role", (node) => node.role],
  ["condition", "State", (node) => h("span", { title: node.why }, node.tone === "bad" || node.tone === "warn" ? h("span", { class: `pill ${node.tone}` }, node.condition) : node.condition)],
  ["version", "Version", (node) => node.version ?? "–", "n"],
  ["behind", "Behind", (node) => node.behind ?? "–", "n"],
  ["speed", "Tokens/s", (node) => (node.speed ? count(node.speed) : "–"), "n"],
  ["busy", "Busy", (node) => percent(node.busy, 0), "n"],
  ["accepted", "Accepted", (node) => (node.role === "worker" ? count(node.accepted) : "–"), "n"],
  ["rejected", "Rejected", (node) => (node.role === "worker" ? count(node.rejected) : "–"), "n"],
  ["missed", "Missed", (node) => (node.role === "worker" ? count(node.missed) : "–"), "n"],
  ["credited", "Credited", (node) => (node.role === "worker" ? count(node.credited) : "–"), "n"],
  ["streak", "Honest in a row", (node) => (node.role === "worker" ? `${count(node.streak)} of ${count(node.checks)}` : "–"), "n"],
  ["evidence", "Evidence against", (node) => (node.role === "worker" && node.limit ? `${brief(Math.max(node.evidence, 0))} of ${brief(node.limit)}` : "–"), "n"],
  ["seen_s", "Seen", (node) => `${duration(node.seen_s)} ago`, "n"],
  ["memory", "Memory", (node) => bytes(node.memory), "n"],
  ["doing", "Doing (as it says)", (node) => h("span", { class: "muted" }, node.doing), "wrap"],
];

export class Nodes {
  constructor(run) {
    this.run = run;
    this.by = null;
    this.down = false;
    this.text = "";
    const search = h("input", { type: "search", placeholder: "name, role or state", oninput: (event) => { this.text = event.target.value.toLowerCase(); this.draw(); } });
    this.note = h("span", { class: "muted" });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of nodes" });
    this.tree = h("div", { class: "scroll" });
    this.root = h("div", { class: "page" }, h("h1", { class: "unseen" }, "Nodes"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Nodes"), this.note), h("div", { class: "filters bar" }, h("label", {}, "Find", search)), this.table),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "How weights spread")), h("p", { class: "muted" }, "Each node under the one that sent it most of the newest version, with the rate of every sender."), this.tree));
  }

  start() {
    this.look();
    this.timer = setInterval(() => this.look(), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async look() {
    if (document.hidden || (this.found && this.run.overview.state !== "running")) return;
    this.found = await ask("/api/nodes");
    this.draw();
  }

  draw() {
    if (!this.found) return;
    let rows = this.found.nodes.filter((node) => `${node.name} ${node.role} ${node.condition}`.toLowerCase().includes(this.text));
    if (this.by) rows = [...rows].sort((a, b) => compare(a[this.by], b[this.by]) * (this.down ? -1 : 1));
    const columns = COLUMNS.filter(([key]) => !WHERE_KNOWN.includes(key) || rows.some((node) => node[key]));
    this.note.textContent = rows.length > PAGE ? `${PAGE} of ${rows.length} shown, problems first` : `${rows.length}`;
    const headings = columns.map(([key, title, , align]) => h("th", { class: align, scope: "col", "aria-sort": this.by === key ? (this.down ? "descending" : "ascending") : null }, h("button", { type: "button", onclick: () => this.sort(key) }, title + (this.by === key ? (this.down ? " ↓" : " ↑") : ""))));
    replace(this.table, h("table", {}, h("thead", {}, h("tr", {}, headings)), h("tbody", {}, rows.slice(0, PAGE).map((node) => h("tr", {}, columns.map(([, , write, align]) => h("td", { class: align }, write(node))))))));
    this.drawTree(this.found.broadcast);
  }

  drawTree({ tree, left_out }) {
    const rows = tree.map((node) => {
      const name = h("td", {}, `${"\u2003".repeat(node.depth)}${node.depth ? "└ " : ""}${node.name}`);
      const senders = node.from.map((edge) => `${edge.name} ${bytes(edge.bytes_per_s)}/s`).join(", ");
      return h("tr", {}, name, h("td", { class: "dim" }, node.role), h("td", { class: "n" }, node.version ?? "–"), h("td", { class: "n" }, node.behind_s === null ? "–" : `${brief(node.behind_s)} s`), h("td", { class: "dim" }, senders));
    });
    const heads = ["Node", "Role", "Version", "Arrived after", "From"].map((title, index) => h("th", { scope: "col", class: index === 2 || index === 3 ? "n" : null }, title));
    replace(this.tree, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)), left_out ? h("p", { class: "muted" }, `and ${left_out} more that only receive`) : null);
  }

  sort(key) {
    this.down = this.by === key ? !this.down : typeof this.found.nodes[0]?.[key] === "number";
    this.by = key;
    this.draw();
  }
}

function compare(a, b) {
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : a > b ? 1 : 0;
}
