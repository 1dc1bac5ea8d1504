// The rollout browser: groups by filter, one group side by side, and why a submission was rejected.

import { h, replace } from "./dom.js";
import { brief, clock, count, number, percent } from "./figures.js";
import { ask } from "./run.js";

const VERDICTS = [["", "any"], ["accepted", "accepted"], ["filtered", "accepted, no signal"], ["rejected", "rejected"]];

export class Rollouts {
  constructor(run) {
    this.run = run;
    this.rows = [];
    const field = (words, control) => h("label", {}, words, control);
    const number_ = (step) => h("input", { type: "number", step, onchange: () => this.filter() });
    this.verdict = h("select", { onchange: () => this.filter() }, VERDICTS.map(([value, words]) => h("option", { value }, words)));
    this.worker = h("select", { onchange: () => this.filter() }, h("option", { value: "" }, "any"));
    this.source = h("select", { onchange: () => this.filter() }, h("option", { value: "" }, "any"));
    this.task = number_("1");
    this.least = number_("any");
    this.most = number_("any");
    this.version = number_("1");
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups" });
    this.more = h("button", { type: "button", class: "quiet", onclick: () => this.look(true) }, "More");
    this.shown = h("section", { class: "card" }, h("p", { class: "muted" }, "Choose a group to see its completions side by side."));
    this.root = h("div", { class: "page" }, h("h1", { class: "unseen" }, "Rollouts"),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Groups and rejected submissions"), h("button", { type: "button", class: "quiet figure", onclick: () => this.filter() }, "Newest")),
        h("div", { class: "filters bar" }, field("Verdict", this.verdict), field("Worker", this.worker), field("Source", this.source), field("Task", this.task), field("Reward from", this.least), field("to", this.most), field("Version", this.version)), this.table, this.more),
      this.shown);
    this.table.style.maxHeight = "42vh";
  }

  start(rest) {
    if (!this.rows.length) this.filter();
    if (rest.length && rest[0]) this.open(Number(rest[0]), rest[1] === undefined ? null : Number(rest[1]));
  }

  stop() {}

  filter() {
    this.rows = [];
    this.before = "";
    this.look(true);
  }

  async look() {
    const query = new URLSearchParams();
    for (const [name, control] of [["verdict", this.verdict], ["worker", this.worker], ["source", this.source], ["task", this.task], ["reward_min", this.least], ["reward_max", this.most], ["version", this.version]]) {
      if (control.value !== "") query.set(name, control.value);
    }
    if (this.before) query.set("before", this.before);
    let found;
    try {
      found = await ask(`/api/groups?${query}`);
    } catch (error) {
      replace(this.table, h("p", { class: "muted" }, error.message));
      return;
    }
    this.rows.push(...found.rows);
    this.before = found.before ?? "";
    this.more.hidden = !this.before;
    options(this.worker, found.workers);
    options(this.source, found.sources);
    this.draw();
  }

  draw() {
    const heads = [["", ""], ["Reward", "n"], ["Prompt", ""], ["First completion", ""], ["Worker", ""], ["Version", "n"], ["Tokens", "n"], ["What became of it", ""], ["Judged", "n"]];
    const body = this.rows.map((row) => {
      const open = () => { location.hash = row.group === null ? `rollouts/${row.submission}` : `rollouts/${row.submission}/${row.group}`; };
      const name = row.group === null ? `#${row.submission}` : `#${row.submission}.${row.group}`;
      const chosen = this.chosen === name;
      return h("tr", { class: "pick", "aria-selected": chosen ? "true" : null, onclick: open },
        h("td", { class: "first" }, h("a", { href: row.group === null ? `#rollouts/${row.submission}` : `#rollouts/${row.submission}/${row.group}` }, name)),
        h("td", { class: "n" }, number(row.reward, 2)),
        h("td", { class: "mono" }, h("div", { class: "snip" }, row.prompt ?? (row.task === null ? "" : `${row.source} ${row.task}`))),
        h("td", { class: "mono" }, h("div", { class: "snip" }, row.completion ?? "")),
        h("td", {}, row.worker), h("td", { class: "n" }, row.version), h("td", { class: "n" }, count(row.tokens)),
        h("td", {}, row.reason ? h("span", { class: "pill bad" }, `rejected: ${row.reason}`) : row.fate), h("td", { class: "n dim" }, clock(row.judged_s)));
    });
    replace(this.table, body.length ? h("table", {}, h("thead", {}, h("tr", {}, heads.map(([title, align]) => h("th", { scope: "col", class: align || null }, title)))), h("tbody", {}, body)) : h("p", { class: "muted" }, "Nothing like that."));
  }

  async open(seq, group) {
    this.chosen = group === null ? `#${seq}` : `#${seq}.${group}`;
    this.draw();
    let submission;
    try {
      submission = await ask(`/api/submissions/${seq}`);
    } catch (error) {
      replace(this.shown, h("p", { class: "muted" }, error.message));
      return;
    }
    const shown = group ?? 0;
    const completions = h("div", {}, h("p", { class: "muted" }, "Reading the file …"));
    const others = Array.from({ length: submission.groups }, (_, index) => h("a", { href: `#rollouts/${seq}/${index}`, class: "quiet", "aria-current": index === shown ? "true" : null }, String(index)));
    replace(this.shown,
      h("header", {}, h("h2", {}, `Submission #${seq}, group ${shown}`), h("span", { class: "figure" }, h("small", {}, `${submission.worker} · version ${submission.version} · step ${submission.step + 1}`))),
      verdict(submission), submission.groups > 1 ? h("div", { class: "bar" }, h("span", { class: "muted" }, "Groups"), others) : null, completions);
    try {
      replace(completions, sides(await ask(`/api/submissions/${seq}/groups/${shown}`)));
    } catch (error) {
      replace(completions, h("p", { class: "muted" }, `The rollouts cannot be shown: ${error.message}.`));
    }
    this.shown.scrollIntoView({ block: "nearest" });
  }
}

function verdict(submission) {
  const { replay } = submission;
  if (submission.state === "rejected") {
    const figures = submission.evidence.map(({ name, value }) => h("tr", {}, h("td", { class: "dim" }, name), h("td", { class: "n" }, brief(value))));
    return h("div", { class: `verdict ${submission.hard ? "bad" : "warn"}` }, h("h3", {}, `Rejected: ${submission.reason}`), h("p", {}, submission.words), h("p", { class: "muted" }, submission.detail), h("p", { class: "muted" }, submission.hard ? "The worker's own signature proves it, so the worker is slashed." : "This can happen to an honest worker, so nothing is slashed for it."), h("details", {}, h("summary", {}, `What ${submission.validator ?? "the validator"} measured`), h("table", {}, h("tbody", {}, figures))));
  }
  const bits = replay ? `, ${count(replay.tokens)} tokens computed again and equal to the last bit` : "";
  const how = submission.full === false ? "checked in part" : "checked whole";
  const words = submission.state === "accepted" ? `Accepted: ${how} by ${submission.validator ?? "a validator"}${bits}.` : `State: ${submission.state}.`;
  return h("div", { class: "verdict" }, h("p", {}, words));
}

// Tokens are marked by probability, or by how far they miss the tokens that the seeds yield.
function sides(group) {
  const texts = [];
  const cards = completions(group, texts);
  const legends = h("div", { class: "legend" });
  const ways = group.margins ? ["margin", "chance"].map((way) => h("button.quiet", { type: "button", onclick: () => mark(way) }, way === "margin" ? "Replay margin" : "Probability")) : [];
  const mark = (way) => {
    for (const [index, button] of ways.entries()) button.setAttribute("aria-pressed", (index === 0) === (way === "margin"));
    for (const [host, tokens] of texts) replace(host, tokens.map((one) => token(one, way, group.margin_limit)));
    replace(legends, h("span", {}, group.task), legend(group, way));
  };
  mark(group.margins && group.completions.some((found) => found.tokens.some(([, , margin]) => margin > 0)) ? "margin" : "chance");
  return [
    ways.length ? h("div", { class: "bar" }, h("span", { class: "muted" }, "Mark tokens by"), ways) : null,
    legends,
    group.prompt === null ? null : h("div", { class: "prompt text", tabindex: "0", role: "region", "aria-label": "Prompt" }, group.prompt),
    h("p", {}),
    h("div", { class: "sides" }, cards),
  ];
}

function completions(group, texts) {
  const best = Math.max(...group.completions.map((found) => found.reward ?? -Infinity));
  const spread = group.completions.some((found) => found.reward !== best);
  return [...group.completions].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0)).map((found) => {
    const text = h("div", { class: "text" });
    texts.push([text, found.tokens]);
    return h("article", { class: `side${spread && found.reward === best ? " best" : ""}` },
      h("header", {}, h("b", {}, `reward ${number(found.reward, 2)}`), found.advantage === null ? null : h("span", {}, `${found.advantage >= 0 ? "+" : ""}${number(found.advantage, 2)}`), h("span", {}, `${found.length} tokens${group.target ? ` of ${group.target}` : ""}`)),
      text, found.cut ? h("p", { class: "muted" }, "… cut here") : null);
  });
}

function legend(group, way) {
  const box = (kind, words) => h("span", {}, h("i", { class: `box ${kind}` }), words);
  const claimed = group.claimed ? h("span", {}, "These are the worker's own claims.") : null;
  if (way === "margin") {
    const limit = brief(group.margin_limit);
    const cut = group.farthest ? h("span", {}, `Only the ${group.farthest} farthest tokens of the submission are recorded.`) : null;
    return [h("span", {}, "A token is marked by how far it misses the one its seed yields, in nats:"), box("fill c-accent", `beyond the limit of ${limit}`), box("fill c-soft", "beyond half of it"), box("p2", "less, but not 0"), cut, claimed];
  }
  const why = group.margins ? null : h("span", {}, "The validator recorded no replay margins of this submission.");
  return [h("span", {}, "A token is marked by its probability:"), box("fill c-accent", "below 1 %"), box("fill c-soft", "below 10 %"), box("p2", "below 50 %"), why, claimed];
}

function token([text, chance, margin], way, limit) {
  if (chance === null) return h("span", { class: "env", title: "not sampled" }, text);
  const steps = way === "margin" ? [margin > limit, margin > limit / 2, margin > 0] : [chance < 0.01, chance < 0.1, chance < 0.5];
  const shade = ["p0", "p1", "p2"][steps.indexOf(true)] ?? null;
  return h("span", { class: shade, title: margin > 0 ? `${percent(chance)}, misses by ${brief(margin)} nats` : percent(chance) }, text);
}

function options(select, names) {
  if (select.options.length > 1 || !names.length) return;
  select.append(...names.map((name) => h("option", { value: name }, name)));
}
