// Sample completions, the run's figures and configuration, and the result of its audit.

import { h, replace } from "./dom.js";
import { bytes, count, duration, number, percent } from "./figures.js";
import { fetchJson } from "./run.js";

export class About {
  constructor(run) {
    this.run = run;
    this.facts = h("div", { class: "stats" });
    this.samples = h("div");
    this.audit = h("div");
    this.config = h("pre", { class: "text" });
    const card = (title, ...content) => h("section", { class: "card" }, h("header", {}, h("h2", {}, title)), content);
    this.root = h("div", { class: "page" }, h("h1", { class: "visually-hidden" }, "About"), card("The run", this.facts), h("div", { class: "page two" }, card("What the model wrote", this.samples), h("div", { class: "page" }, card("Audit", this.audit), card("Configuration", this.config))));
  }

  async start() {
    this.data = await fetchJson("/api/about");
    this.changed();
  }

  stop() {}

  changed() {
    if (!this.data) return;
    const { overview } = this.run;
    const { memory, samples, audit, config } = this.data;
    const facts = [[`${overview.trained} of ${overview.steps}`, "steps"], [duration(overview.elapsed_s), "elapsed"], [count(overview.tokens), "tokens generated"], [count(overview.tokens_trained), "tokens trained"], [percent(overview.busy, 0), "learner busy"], [count(overview.exact.tokens), "exact tokens"], [bytes(memory), "memory, all processes"], [`${overview.loss} on ${overview.sources.join(", ")}`, overview.model]];
    replace(this.facts, facts.map(([value, label]) => h("div", {}, h("b", {}, value), h("span", {}, label))));
    replace(this.samples, samples.length ? samples.map(sampleCard) : h("p", { class: "muted" }, "No samples were recorded."));
    replace(this.audit, audit === null ? h("p", { class: "muted" }, "This run has not been audited yet. ", h("code", {}, "shoal audit FOLDER > FOLDER/audit.txt"), " checks its ledger, files and steps again.") : h("pre", { class: "text" }, audit));
    replace(this.config, config);
  }
}

function sampleCard(sample) {
  return h("article", { class: "sample" }, h("header", { class: "muted" }, `version ${sample.policy_version} · reward ${number(sample.reward, 2)} · ${sample.tokens} tokens · ${sample.worker}`), h("div", { class: "text prompt" }, sample.prompt), h("div", { class: "text" }, sample.completion));
}
