// What the model wrote, what the run went by, and what its audit said.

import { h, replace } from "./dom.js";
import { bytes, count, duration, number, percent } from "./figures.js";
import { ask } from "./run.js";

export class About {
  constructor(run) {
    this.run = run;
    this.facts = h("div", { class: "stats" });
    this.samples = h("div");
    this.audit = h("div");
    this.config = h("pre", { class: "text" });
    const card = (title, ...content) => h("section", { class: "card" }, h("header", {}, h("h2", {}, title)), content);
    this.root = h("div", { class: "page" }, h("h1", { class: "unseen" }, "About"), card("The run", this.facts), h("div", { class: "page two" }, card("What the model wrote", this.samples), h("div", { class: "page" }, card("Audit", this.audit), card("Configuration", this.config))));
  }

  async start() {
    this.found = await ask("/api/about");
    this.changed();
  }

  stop() {}

  changed() {
    if (!this.found) return;
    const { overview } = this.run;
    const { memory, samples, audit, config } = this.found;
    const facts = [[`${overview.trained} of ${overview.steps}`, "steps"], [duration(overview.elapsed_s), "took"], [count(overview.tokens), "tokens generated"], [count(overview.tokens_trained), "tokens trained"], [percent(overview.busy, 0), "learner busy"], [count(overview.exact.tokens), "exact tokens"], [bytes(memory), "memory, all processes"], [`${overview.loss} on ${overview.sources.join(", ")}`, overview.model]];
    replace(this.facts, facts.map(([value, words]) => h("div", {}, h("b", {}, value), h("span", {}, words))));
    replace(this.samples, samples.length ? samples.map(sample) : h("p", { class: "muted" }, "No sample was recorded."));
    replace(this.audit, audit === null ? h("p", { class: "muted" }, "This run was not audited yet. ", h("code", {}, "shoal audit FOLDER > FOLDER/audit.txt"), " checks its ledger, files and steps again.") : h("pre", { class: "text" }, audit));
    replace(this.config, config);
  }
}

function sample(one) {
  return h("article", { class: "sample" }, h("header", { class: "muted" }, `version ${one.policy_version} · reward ${number(one.reward, 2)} · ${one.tokens} tokens · ${one.worker}`), h("div", { class: "text prompt" }, one.prompt), h("div", { class: "text" }, one.completion));
}
