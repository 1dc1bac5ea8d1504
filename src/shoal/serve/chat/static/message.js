// One message: what was said, what was thought, and for a reply its facts, its proof and its check.

import { ask, post } from "./api.js";
import { h, icon } from "./dom.js";
import { parse, render, thinking } from "./markdown.js";
import { math } from "./math.js";

const code = (lang, text) => {
  const copy = h("button.quiet", { "aria-label": "Copy the code" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copied(copy, text));
  return h("figure.code", {}, h("figcaption", {}, h("span", {}, lang || "text"), copy), h("pre", { tabindex: "0" }, h("code", {}, text)));
};

export async function copied(button, text) {
  await navigator.clipboard.writeText(text);
  button.replaceChildren(icon("check"), "Copied");
  setTimeout(() => button.replaceChildren(icon("copy"), "Copy"), 1500);
}

export function prose(text, { writing = false } = {}) {
  const { thought, said, open } = thinking(text);
  const parts = [];
  if (thought !== null) {
    const words = thought.trim().split(/\s+/).filter(Boolean).length;
    parts.push(h("details.thought", { open: open && writing },
      h("summary", {}, open && writing ? "Thinking" : `Thought for ${words} word${words === 1 ? "" : "s"}`),
      h("div.prose", {}, render(parse(thought), h, code, math))));
  }
  parts.push(h("div.prose", {}, render(parse(said), h, code, math)));
  return parts;
}

// `at`: the message's path in the API.
export const versionName = (version, id) => (version === null || version === undefined ? id : version === 0 ? "Before training" : `Version ${version}`);

export function reply(message, { at, alternatives, onagain, onpick, onbranch }) {
  const { facts } = message;
  const panel = h("section.facts", { hidden: true, "aria-label": "How to check this reply" });
  const badge = h("button.quiet.badge", { "aria-expanded": "false", onclick: toggle }, icon("shield"), h("span", {}, "Proof"));
  const copy = h("button.quiet", { "aria-label": "Copy the reply" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copied(copy, message.content));

  function toggle() {
    panel.hidden = !panel.hidden;
    badge.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.firstChild) panel.append(...details());
    if (!panel.hidden) panel.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function details() {
    const outcome = h("div.outcome", { role: "status" });
    const check = h("button.primary.small", { onclick: recompute }, "Recompute it");

    async function recompute() {
      check.disabled = true;
      check.textContent = "Recomputing…";
      try {
        const verdict = await post(`${at}/verify`, {});
        badge.className = `quiet badge ${verdict.passed ? "verified" : "refused"}`;
        badge.replaceChildren(icon(verdict.passed ? "shield" : "cross"), h("span", {}, verdict.passed ? "Verified" : "Refused"));
        outcome.replaceChildren(
          h("ul", {}, verdict.findings.map((one) => h(`li.${one.passed ? "yes" : "no"}`, {}, icon(one.passed ? "check" : "cross"),
            h("span", {}, one.question, one.detail ? h("small", {}, ` ${one.detail}`) : null)))),
          h("p", {}, verdict.sentence));
      } catch (refused) {
        outcome.replaceChildren(h("p.error", {}, refused.message));
      }
      check.textContent = "Recompute it";
      check.disabled = false;
      panel.scrollIntoView({ block: "nearest", behavior: "smooth" });
    }

    const download = h("button.quiet", { onclick: async () => save(await (await ask(`${at}/proof`)).blob(), "reply.json") }, icon("down"), "Download the proof");
    const rows = [["Weights", `${facts.model} · ${facts.weights.slice(0, 16)}`], ["Seed", facts.seed],
      ["Temperature", String(facts.temperature)], ["Tokens", `${facts.prompt_tokens} in, ${facts.tokens} out, ${facts.seconds.toFixed(1)} s`]];
    return [
      h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      message.proven ? h("div.row", {}, check, download) : h("p.error", {}, facts.unproven ?? "Nothing was generated, so there is nothing to prove."),
      outcome,
      h("p.hint", {}, "Elsewhere: ", h("code", {}, "shoal audit reply.json --model RUN|MODEL")),
    ];
  }

  return h("article.reply", { "aria-label": `Reply by ${facts.model}` },
    facts.pair ? h("header", {}, versionName(facts.version, facts.model)) : null,
    prose(message.content),
    message.content ? null : h("p.none", {}, "The reply is empty: the model ended at once."),
    note(facts),
    h("div.acts", {},
      copy,
      onagain ? h("button.quiet", { "aria-label": "Regenerate the reply", onclick: onagain }, icon("again"), "Again") : null,
      onpick ? h("button.quiet", { onclick: onpick }, icon("check"), "Continue with this") : null,
      switcher(alternatives, message, onbranch),
      badge),
    panel);
}

function note(facts) {
  const parts = [];
  if (facts.finish === "cancelled") parts.push(h("span", {}, "Stopped"));
  if (facts.finish === "length") parts.push(h("span", {}, "Cut at the length limit"));
  if (facts.target) {
    parts.push(h("span.budget", {}, h("meter", { min: "0", max: String(2 * facts.target), value: Math.min(facts.tokens, 2 * facts.target), "aria-label": "Tokens used of the budget" }),
      `${facts.tokens} of ${facts.target} tokens`));
  }
  return parts.length ? h("p.note", {}, parts) : null;
}

export function said(message, { alternatives, onedit, onbranch }) {
  const article = h("article.said", { "aria-label": "You" }, h("div.bubble", {}, message.content),
    h("div.acts", {}, switcher(alternatives, message, onbranch),
      h("button.quiet", { "aria-label": "Edit the message", onclick: edit }, icon("edit"))));

  function edit() {
    const text = h("textarea.field", { rows: "3", "aria-label": "Edit the message", value: message.content });
    const form = h("form.edit", { onsubmit: (event) => { event.preventDefault(); if (text.value.trim()) onedit(text.value.trim()); } },
      text, h("div.row", {}, h("button.primary.small", { type: "submit" }, "Send"), h("button.quiet", { type: "button", onclick: () => form.replaceWith(article) }, "Cancel")));
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") form.replaceWith(article);
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
    });
    article.replaceWith(form);
    text.focus();
  }
  return article;
}

function switcher(groups, message, onbranch) {
  if (!groups || groups.length < 2) return null;
  const at = groups.findIndex((group) => group.some((one) => one.id === message.id));
  const step = (by, label, picture) => h("button.quiet", { "aria-label": label, disabled: !groups[at + by], onclick: () => onbranch(groups[at + by][0]) }, icon(picture));
  return h("span.switch", {}, step(-1, "Previous version", "left"), h("span", {}, `${at + 1} / ${groups.length}`), step(1, "Next version", "right"));
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
