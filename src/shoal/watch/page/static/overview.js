// The first screen: three answers and six charts.

import { Chart, legend } from "./chart.js";
import { h, replace } from "./dom.js";
import { brief, count, last, middle, number, percent, smooth, verdicts } from "./figures.js";
import { ask } from "./run.js";

const MANY = 9; // nodes from which on they are cells instead of rows
const EVERY_MS = 4000;
const LONGEST_NAME = 18; // of a node or of another run
const FLOW = [["useful", "useful", "c-soft"], ["filtered", "no signal", "c-idle"], ["late", "too late", "c-muted"], ["rejected", "rejected", "c-bad"]];

export class Overview {
  constructor(run) {
    this.run = run;
    this.answers = h("section", { class: "answers", "aria-label": "Three questions" });
    this.reward = card("Reward and held-out accuracy", "Reward per step, and accuracy on held-out tasks by version");
    this.policy = rowsCard("Policy", [["entropy", "Entropy"], ["mismatch", "Mismatch KL"], ["clip", "Clipped"], ["grad_norm", "Gradient norm"]]);
    this.waste = card("What became of the groups", "Groups per step by what became of them");
    this.age = card("Age of what is trained on", "Rollout age in versions, mean and maximum");
    this.verdicts = card("Verdicts", "Submissions per step by verdict");
    this.nodes = { root: h("section", { class: "card" }), title: h("h2", {}, "Nodes"), figure: h("span", { class: "figure" }), body: h("div") };
    this.nodes.root.append(h("header", {}, this.nodes.title, this.nodes.figure), this.nodes.body);
    this.root = h("div", {}, h("h1", { class: "unseen" }, "Overview"), this.answers, h("div", { class: "charts" }, this.reward.root, this.policy.root, this.waste.root, this.age.root, this.verdicts.root, this.nodes.root));
  }

  start() {
    this.draw();
    this.look();
    this.timer = setInterval(() => this.look(), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async look() {
    if (document.hidden || this.busy || (this.table && this.run.overview.state !== "running")) return;
    this.busy = true;
    try {
      if (this.run.details) this.run.flow = await ask("/api/flow");
      this.table = (await ask("/api/nodes")).nodes;
      this.draw();
    } finally {
      this.busy = false;
    }
  }

  changed() {
    this.draw();
  }

  draw() {
    const { curves, overview, evaluations } = this.run;
    const value = (name) => curves.values[name] || [];
    replace(this.answers, overview.answers.map(answerCard));
    this.drawReward(curves, evaluations, value("reward"));
    this.drawPolicy(curves, value);
    this.drawFlow(overview, value);
    const stale = [{ name: "oldest", values: value("stale_max"), class: "c-soft" }, { name: "mean", values: value("stale_mean"), class: "c-accent", ...edges(curves, "stale_mean") }];
    const limit = overview.async_level;
    this.age.figure(number(last(value("stale_mean")), 1), "versions, last step");
    this.age.legend([["mean", "", "c-accent"], ["oldest", "", "c-soft"]]);
    this.age.chart.set({ x: curves.x, lines: stale, least: 1, limits: limit ? [{ value: limit, text: `limit ${limit}` }] : [], summary: `Last mean ${number(last(value("stale_mean")), 1)}` });
    this.drawVerdicts(overview);
    this.drawNodes(overview);
  }

  drawReward(curves, evaluations, reward) {
    const few = reward.length < 5;
    const lines = [{ name: "reward", values: reward, class: few ? "c-accent" : "c-accent thin", ...edges(curves, "reward") }];
    if (!few) lines.push({ name: "smoothed", values: smooth(reward), class: "c-accent" });
    const dots = ["greedy", "sampled"].map((kind) => {
      const known = evaluations.filter((found) => found[kind] !== null);
      return { name: `held-out, ${kind}`, x: known.map((found) => found.x), values: known.map((found) => found[kind]), class: kind === "greedy" ? "dot c-ink" : "ring c-ink" };
    });
    const entries = [["reward", "", "c-accent"], ["held-out, greedy", "dot", "c-ink"], ["held-out, sampled", "ring", ""]];
    for (const other of this.run.others) {
      const known = other.evaluations.filter((found) => found.greedy !== null);
      lines.unshift({ x: other.curves.x, values: smooth(other.curves.values.reward), class: "c-faint thin" });
      dots.unshift({ name: `held-out, ${other.name}`, x: known.map((found) => found.x), values: known.map((found) => found.greedy), class: "ring c-faint" });
      entries.push([middle(other.name, LONGEST_NAME), "", "c-faint"]);
    }
    const accuracy = last(evaluations.map((found) => found.greedy ?? found.sampled));
    if (accuracy !== null) this.reward.figure(percent(accuracy), "held out");
    else this.reward.figure(number(last(reward)), "reward");
    this.reward.legend(entries);
    this.reward.chart.set({ x: curves.x, lines, dots, summary: `Last reward ${number(last(reward))}, held out ${percent(accuracy)}` });
  }

  drawPolicy(curves, value) {
    const clip = curves.x.map((_, index) => sum([value("clip_low")[index], value("clip_high")[index]]));
    for (const [name, list, write] of [["entropy", value("entropy"), brief], ["mismatch", value("mismatch"), brief], ["clip", clip, percent], ["grad_norm", value("grad_norm"), brief]]) {
      const row = this.policy[name];
      row.value.textContent = write(last(list));
      row.chart.set({ x: curves.x, lines: [{ name: row.label, values: list, class: "c-accent", write, ...edges(curves, name) }], mini: true, summary: `Last ${write(last(list))}` });
    }
  }

  drawFlow(overview, value) {
    const flow = this.run.flow;
    const speed = last(value("tokens_per_s"));
    this.waste.figure(count(speed), "tokens/s trained");
    if (!flow?.groups) {
      this.waste.legend([["tokens/s trained", "", "c-accent"]]);
      this.waste.chart.set({ x: this.run.curves.x, lines: [{ name: "tokens/s", values: value("tokens_per_s"), class: "c-accent" }], write: count });
      return;
    }
    const all = FLOW.map(([name]) => total(flow.groups[name]));
    const made = total(all) || 1;
    const shown = FLOW.filter((_, index) => all[index] || index < 2);
    const old = overview.stale ? [[`${count(overview.stale)} useful grew too old`, "box", "c-warn"]] : [];
    this.waste.legend([...shown.map(([name, words, colour]) => [`${words} ${percent(total(flow.groups[name]) / made, 0)}`, "box", colour]), ...old]);
    this.waste.chart.set({ x: flow.x, xName: flow.per > 1 ? `${flow.per} steps to` : "step", bars: shown.map(([name, words, colour]) => ({ name: words, values: flow.groups[name], class: colour })), write: count, summary: shown.map(([name, words]) => `${words} ${percent(total(flow.groups[name]) / made, 0)}`).join(", ") });
  }

  drawVerdicts(overview) {
    const flow = this.run.flow;
    const judged = overview.accepted + overview.rejected;
    this.verdicts.figure(percent(judged ? overview.accepted / judged : null), `of ${count(judged)} accepted`);
    if (!flow?.verdicts) {
      const words = Object.entries(overview.reasons).map(([reason, [n, hard]]) => [verdicts(reason, n), "box", hard ? "c-bad" : "c-warn"]);
      this.verdicts.legend([[verdicts("", overview.accepted), "box", "c-soft"], ...words]);
      this.verdicts.chart.set({ x: ["all"], bars: [{ name: "accepted", values: [overview.accepted], class: "c-soft" }, { name: "rejected", values: [overview.rejected], class: "c-bad" }], xName: "steps", write: count });
      return;
    }
    const hard = (reason) => overview.reasons[reason]?.[1];
    const bars = Object.entries(flow.verdicts).map(([reason, values]) => ({ reason, name: reason || "accepted", values, class: reason ? (hard(reason) ? "c-bad" : "c-warn") : "c-soft" }));
    bars.sort((a, b) => (b.class === "c-soft") - (a.class === "c-soft"));
    this.verdicts.legend(bars.map((bar) => [verdicts(bar.reason, total(bar.values)), "box", bar.class]));
    this.verdicts.chart.set({ x: flow.x, xName: flow.per > 1 ? `${flow.per} steps to` : "step", bars, write: count, summary: bars.map((bar) => verdicts(bar.reason, total(bar.values))).join(", ") });
  }

  drawNodes(overview) {
    const { nodes } = overview;
    const bad = [["slashed or evicted", nodes.evicted], ["silent", nodes.silent], ["suspended", nodes.suspended]].filter(([, n]) => n);
    replace(this.nodes.figure, String(nodes.all - nodes.evicted - nodes.left), h("small", {}, ` in the pool${bad.length ? ", " : ""}${bad.map(([words, n]) => `${n} ${words}`).join(", ")}`));
    if (!this.table) return;
    if (this.table.length > MANY) {
      this.nodes.body.className = "cells";
      replace(this.nodes.body, this.table.map((node) => h("i", { class: node.tone, title: `${node.name}: ${node.role}, ${node.condition}` })));
      return;
    }
    this.nodes.body.className = "members";
    replace(this.nodes.body, this.table.map(memberRow));
  }
}

function memberRow(node) {
  const busy = node.busy === null ? null : Math.round(100 * node.busy);
  const words = node.tone === "good" || node.tone === "none" ? (node.speed && node.role !== "learner" ? `${count(node.speed)} tok/s` : node.role) : node.condition;
  const share = busy === null ? "" : `${busy} % busy`;
  return h("div", { class: "member" }, h("i", { class: `mark ${node.tone}`, "aria-hidden": "true" }), h("span", { class: "name", title: node.name }, middle(node.name, LONGEST_NAME)), busy === null ? h("span") : h("span", { class: "meter", "aria-hidden": "true" }, h("i", { "width%": busy })), h("span", { class: "is", title: "share of its time" }, share), h("span", { class: "is" }, words));
}

function answerCard(answer) {
  return h("section", { class: `answer ${answer.tone}` }, h("h2", {}, answer.question), h("div", { class: "said" }, answer.answer), h("p", { class: "why", title: answer.detail }, answer.detail));
}

function card(title, label) {
  const chart = new Chart(label);
  const figure = h("span", { class: "figure" });
  const names = h("div");
  return {
    root: h("section", { class: "card" }, h("header", {}, h("h2", {}, title), figure), names, chart.host),
    chart,
    figure: (value, words) => replace(figure, value, h("small", {}, ` ${words}`)),
    legend: (entries) => replace(names, legend(entries)),
  };
}

function rowsCard(title, rows) {
  const found = { root: h("section", { class: "card" }, h("header", {}, h("h2", {}, title))) };
  const body = h("div", { class: "rows" });
  for (const [name, label] of rows) {
    const chart = new Chart(`${label} per step`);
    const value = h("span", { class: "value" });
    found[name] = { chart, value, label };
    body.append(h("div", { class: "rowline" }, h("span", { class: "name" }, label), value, chart.host));
  }
  found.root.append(body);
  return found;
}

const edges = (curves, name) => (curves.low[name] ? { low: curves.low[name], high: curves.high[name] } : {});
const total = (values) => values.reduce((sum, value) => sum + (value || 0), 0);
const sum = (values) => (values.every((value) => value === undefined || value === null) ? null : total(values));
