// The first screen: three answers and six charts.

import { Chart, legend } from "./chart.js";
import { h, replace } from "./dom.js";
import { brief, count, ellipsize, last, number, percent, smooth, verdicts } from "./figures.js";
import { fetchJson } from "./run.js";

const MAX_ROWS = 9; // more nodes than this are drawn as cells
const EVERY_MS = 4000;
const MAX_NAME = 18; // characters of the name of a node or of another run
const FLOW = [["useful", "useful", "c-soft"], ["filtered", "no signal", "c-idle"], ["late", "too late", "c-muted"], ["rejected", "rejected", "c-bad"]];

export class Overview {
  constructor(run) {
    this.run = run;
    this.answers = h("section", { class: "answers", "aria-label": "Three questions" });
    this.reward = card("Reward and held-out accuracy", "Reward per step, and accuracy on held-out tasks by version");
    this.policy = rowsCard("Policy", [["entropy", "Entropy"], ["mismatch", "Mismatch KL"], ["clip", "Clipped"], ["grad_norm", "Gradient norm"]]);
    this.waste = card("Outcomes of the groups", "Groups per step by outcome");
    this.age = card("Age of trained rollouts", "Rollout age in versions, mean and maximum");
    this.verdicts = card("Verdicts", "Submissions per step by verdict");
    this.nodes = { root: h("section", { class: "card" }), title: h("h2", {}, "Nodes"), figure: h("span", { class: "figure" }), body: h("div") };
    this.nodes.root.append(h("header", {}, this.nodes.title, this.nodes.figure), this.nodes.body);
    this.root = h("div", {}, h("h1", { class: "visually-hidden" }, "Overview"), this.answers, h("div", { class: "charts" }, this.reward.root, this.policy.root, this.waste.root, this.age.root, this.verdicts.root, this.nodes.root));
  }

  start() {
    this.draw();
    this.refresh();
    this.timer = setInterval(() => this.refresh(), EVERY_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  async refresh() {
    if (document.hidden || this.busy || (this.table && this.run.overview.state !== "running")) return;
    this.busy = true;
    try {
      if (this.run.details) this.run.flow = await fetchJson("/api/flow");
      this.table = (await fetchJson("/api/nodes")).nodes;
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
    const ages = [{ name: "oldest", values: value("stale_max"), class: "c-soft" }, { name: "mean", values: value("stale_mean"), class: "c-accent", ...edges(curves, "stale_mean") }];
    const limit = overview.async_level;
    this.age.figure(number(last(value("stale_mean")), 1), "versions, last step");
    this.age.legend([["mean", "", "c-accent"], ["oldest", "", "c-soft"]]);
    this.age.chart.set({ x: curves.x, lines: ages, minHigh: 1, limits: limit ? [{ value: limit, text: `limit ${limit}` }] : [], summary: `Last mean ${number(last(value("stale_mean")), 1)}` });
    this.drawVerdicts(overview);
    this.drawNodes(overview);
  }

  drawReward(curves, evaluations, reward) {
    const isShort = reward.length < 5; // too short to smooth
    const lines = [{ name: "reward", values: reward, class: isShort ? "c-accent" : "c-accent thin", ...edges(curves, "reward") }];
    if (!isShort) lines.push({ name: "smoothed", values: smooth(reward), class: "c-accent" });
    const dots = ["greedy", "sampled"].map((kind) => {
      const measured = evaluations.filter((evaluation) => evaluation[kind] !== null);
      return { name: `held-out, ${kind}`, x: measured.map((evaluation) => evaluation.x), values: measured.map((evaluation) => evaluation[kind]), class: kind === "greedy" ? "dot c-ink" : "ring c-ink" };
    });
    const entries = [["reward", "", "c-accent"], ["held-out, greedy", "dot", "c-ink"], ["held-out, sampled", "ring", ""]];
    for (const other of this.run.others) {
      const measured = other.evaluations.filter((evaluation) => evaluation.greedy !== null);
      lines.unshift({ x: other.curves.x, values: smooth(other.curves.values.reward), class: "c-faint thin" });
      dots.unshift({ name: `held-out, ${other.name}`, x: measured.map((evaluation) => evaluation.x), values: measured.map((evaluation) => evaluation.greedy), class: "ring c-faint" });
      entries.push([ellipsize(other.name, MAX_NAME), "", "c-faint"]);
    }
    const accuracy = last(evaluations.map(({ greedy, sampled }) => greedy ?? sampled));
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
    const totals = FLOW.map(([name]) => total(flow.groups[name]));
    const generated = total(totals) || 1;
    const shown = FLOW.filter((_, index) => totals[index] || index < 2);
    const old = overview.stale ? [[`${count(overview.stale)} useful grew too old`, "box", "c-warn"]] : [];
    this.waste.legend([...shown.map(([name, label, color]) => [`${label} ${percent(total(flow.groups[name]) / generated, 0)}`, "box", color]), ...old]);
    this.waste.chart.set({ x: flow.x, xName: flow.per > 1 ? `${flow.per} steps to` : "step", bars: shown.map(([name, label, color]) => ({ name: label, values: flow.groups[name], class: color })), write: count, summary: shown.map(([name, label]) => `${label} ${percent(total(flow.groups[name]) / generated, 0)}`).join(", ") });
  }

  drawVerdicts(overview) {
    const flow = this.run.flow;
    const judged = overview.accepted + overview.rejected;
    this.verdicts.figure(percent(judged ? overview.accepted / judged : null), `of ${count(judged)} accepted`);
    if (!flow?.verdicts) {
      const reasons = Object.entries(overview.reasons).map(([reason, [n, hard]]) => [verdicts(reason, n), "box", hard ? "c-bad" : "c-warn"]);
      this.verdicts.legend([[verdicts("", overview.accepted), "box", "c-soft"], ...reasons]);
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
    const problems = [["slashed or evicted", nodes.evicted], ["silent", nodes.silent], ["suspended", nodes.suspended]].filter(([, n]) => n);
    replace(this.nodes.figure, String(nodes.all - nodes.evicted - nodes.left), h("small", {}, ` in the pool${problems.length ? ", " : ""}${problems.map(([label, n]) => `${n} ${label}`).join(", ")}`));
    if (!this.table) return;
    if (this.table.length > MAX_ROWS) {
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
  const note = node.tone === "good" || node.tone === "none" ? (node.speed && node.role !== "learner" ? `${count(node.speed)} tok/s` : node.role) : node.condition;
  const share = busy === null ? "" : `${busy} % busy`;
  return h("div", { class: "member" }, h("i", { class: `mark ${node.tone}`, "aria-hidden": "true" }), h("span", { class: "name", title: node.name }, ellipsize(node.name, MAX_NAME)), busy === null ? h("span") : h("span", { class: "meter", "aria-hidden": "true" }, h("i", { "width%": busy })), h("span", { class: "note", title: "share of its time" }, share), h("span", { class: "note" }, note));
}

function answerCard(answer) {
  return h("section", { class: `answer ${answer.tone}` }, h("h2", {}, answer.question), h("div", { class: "headline" }, answer.answer), h("p", { class: "detail", title: answer.detail }, answer.detail));
}

function card(title, label) {
  const chart = new Chart(label);
  const figure = h("span", { class: "figure" });
  const names = h("div");
  return {
    root: h("section", { class: "card" }, h("header", {}, h("h2", {}, title), figure), names, chart.host),
    chart,
    figure: (value, label) => replace(figure, value, h("small", {}, ` ${label}`)),
    legend: (entries) => replace(names, legend(entries)),
  };
}

function rowsCard(title, rows) {
  const cards = { root: h("section", { class: "card" }, h("header", {}, h("h2", {}, title))) };
  const body = h("div", { class: "rows" });
  for (const [name, label] of rows) {
    const chart = new Chart(`${label} per step`);
    const value = h("span", { class: "value" });
    cards[name] = { chart, value, label };
    body.append(h("div", { class: "rowline" }, h("span", { class: "name" }, label), value, chart.host));
  }
  cards.root.append(body);
  return cards;
}

const edges = (curves, name) => (curves.low[name] ? { low: curves.low[name], high: curves.high[name] } : {});
const total = (values) => values.reduce((sum, value) => sum + (value || 0), 0);
const sum = (values) => (values.every((value) => value === undefined || value === null) ? null : total(values));
