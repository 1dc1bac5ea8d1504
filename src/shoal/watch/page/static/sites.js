// The learner's sites: which ones count, and each site's loss, use of time and traffic.

import { Chart, legend } from "./chart.js";
import { h, replace } from "./dom.js";
import { brief, bytes, last, percent, siteLosses } from "./figures.js";

const COLORS = ["c-accent", "c-ink", "c-warn", "c-bad", "c-soft", "c-muted"];
const COLUMNS = [
  ["Site", (site) => h("span", {}, h("i", { class: `mark ${site.tone}`, "aria-hidden": "true" }), ` ${site.name}`)],
  ["State", (site) => (site.tone === "good" ? site.state : h("span", { class: `pill ${site.tone}` }, site.state))],
  ["Loss", (site) => brief(site.loss), "n"],
  ["Computing", (site) => percent(site.computing, 0), "n"],
  ["Waiting for rollouts", (site) => percent(site.waiting, 0), "n"],
  ["Waiting for sites", (site) => percent(site.syncing, 0), "n"],
  ["Sent", (site) => bytes(site.sent), "n"],
  ["Received", (site) => bytes(site.received), "n"],
];

export class Sites {
  constructor(run) {
    this.run = run;
    this.note = h("span", { class: "muted" });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of sites" });
    this.names = h("div");
    this.chart = new Chart("Loss per step at each site");
    this.root = h("div", { class: "page" }, h("h1", { class: "visually-hidden" }, "Sites"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Sites"), this.note), this.table, h("p", { class: "muted" }, "Each site reports these figures about itself, since its start. A site counts if the newest version includes its share of the last batch.")),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Loss at each site")), this.names, this.chart.host));
  }

  start() {
    this.changed();
  }

  stop() {}

  changed() {
    const { curves, overview } = this.run;
    const counting = overview.sites.filter((site) => site.tone === "good").length;
    this.note.textContent = `${counting} of ${overview.sites.length} count`;
    const headings = COLUMNS.map(([title, , align]) => h("th", { scope: "col", class: align }, title));
    const rows = overview.sites.map((site) => h("tr", {}, COLUMNS.map(([, write, align]) => h("td", { class: align }, write(site)))));
    replace(this.table, h("table", {}, h("thead", {}, h("tr", {}, headings)), h("tbody", {}, rows)));
    const lines = siteLosses(curves.values).map(([name, values], index) => ({ name, values, class: COLORS[index % COLORS.length] }));
    replace(this.names, legend(lines.map((line) => [line.name, "", line.class])));
    this.chart.set({ x: curves.x, lines, summary: lines.map((line) => `${line.name} ${brief(last(line.values))}`).join(", ") });
  }
}
