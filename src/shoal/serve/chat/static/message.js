// One message: the user's text, or a reply with its thinking, facts, proof and verification.

import { post, request } from "./api.js";
import { h, icon } from "./dom.js";
import { parse, render, splitThinking } from "./markdown.js";
import { math } from "./math.js";

const code = (lang, text) => h("figure.code", {}, h("figcaption", {}, h("span", {}, lang || "text"), copyButton("Copy the code", text)), h("pre", { tabindex: "0" }, h("code", {}, text)));

function copyButton(label, text) {
  const button = h("button.quiet", { "aria-label": label, onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.replaceChildren(icon("check"), "Copied");
    setTimeout(() => button.replaceChildren(icon("copy"), "Copy"), 1500);
  } }, icon("copy"), "Copy");
  return button;
}

export function prose(text, { writing = false } = {}) {
  const { thinking, answer, open } = splitThinking(text);
  const parts = [];
  if (thinking !== null) {
    const words = thinking.trim().split(/\s+/).filter(Boolean).length;
    parts.push(h("details.thinking", { open: open && writing },
      h("summary", {}, open && writing ? "Thinking" : `Thought for ${words} word${words === 1 ? "" : "s"}`),
      h("div.prose", {}, render(parse(thinking), h, code, math))));
  }
  parts.push(h("div.prose", {}, render(parse(answer), h, code, math)));
  return parts;
}

export const versionName = (version, id) => (version === null || version === undefined ? id : version === 0 ? "Before training" : `Version ${version}`);

// `path`: the message's path in the API.
export function replyMessage(message, { path, alternatives, onregenerate, onpick, onbranch }) {
  const { facts } = message;
  const panel = h("section.facts", { hidden: true, "aria-label": "How to check this reply" });
  const badge = h("button.quiet.badge", { "aria-expanded": "false", onclick: toggle }, icon("shield"), h("span", {}, "Proof"));

  function toggle() {
    panel.hidden = !panel.hidden;
    badge.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.firstChild) panel.append(...details());
    if (!panel.hidden) panel.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function details() {
    const result = h("div.result", { role: "status" });
    const check = h("button.primary.small", { onclick: recompute }, "Recompute it");

    async function recompute() {
      check.disabled = true;
      check.textContent = "Recomputing…";
      try {
        const verdict = await post(`${path}/verify`, {});
        badge.className = `quiet badge ${verdict.passed ? "verified" : "refused"}`;
        badge.replaceChildren(icon(verdict.passed ? "shield" : "cross"), h("span", {}, verdict.passed ? "Verified" : "Refused"));
        result.replaceChildren(
          h("ul", {}, verdict.findings.map(({ passed, question, detail }) => h(`li.${passed ? "passed" : "failed"}`, {}, icon(passed ? "check" : "cross"),
            h("span", {}, question, detail ? h("small", {}, ` ${detail}`) : null)))),
          h("p", {}, verdict.sentence));
      } catch (error) {
        result.replaceChildren(h("p.error", {}, error.message));
      }
      check.textContent = "Recompute it";
      check.disabled = false;
      panel.scrollIntoView({ block: "nearest", behavior: "smooth" });
    }

    const download = h("button.quiet", { onclick: async () => save(await (await request(`${path}/proof`)).blob(), "reply.json") }, icon("down"), "Download the proof");
    const rows = [["Weights", `${facts.model} · ${facts.weights.slice(0, 16)}`], ["Seed", facts.seed],
      ["Temperature", String(facts.temperature)], ["Tokens", `${facts.prompt_tokens} in, ${facts.tokens} out, ${facts.seconds.toFixed(1)} s`]];
    return [
      h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      message.proven ? h("div.row", {}, check, download) : h("p.error", {}, facts.unproven ?? "Nothing was generated, so there is nothing to prove."),
      result,
      h("p.hint", {}, "On another machine: ", h("code", {}, "shoal audit reply.json --model RUN|MODEL")),
    ];
  }

  return h("article.reply", { "aria-label": `Reply by ${facts.model}` },
    facts.pair ? h("header", {}, versionName(facts.version, facts.model)) : null,
    prose(message.content),
    message.content ? null : h("p.empty", {}, "The reply is empty: the model ended at once."),
    note(facts),
    h("div.actions", {},
      copyButton("Copy the reply", message.content),
      onregenerate ? h("button.quiet", { "aria-label": "Regenerate the reply", onclick: onregenerate }, icon("again"), "Regenerate") : null,
      onpick ? h("button.quiet", { onclick: onpick }, icon("check"), "Continue with this") : null,
      branchSwitch(alternatives, message, onbranch),
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

export function userMessage(message, { alternatives, onedit, onbranch }) {
  const article = h("article.user", { "aria-label": "You" }, h("div.bubble", {}, message.content),
    h("div.actions", {}, branchSwitch(alternatives, message, onbranch),
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

// Buttons to the previous and the next alternative of a message.
function branchSwitch(groups, message, onbranch) {
  if (!groups || groups.length < 2) return null;
  const at = groups.findIndex((group) => group.some(({ id }) => id === message.id));
  const step = (by, label, name) => h("button.quiet", { "aria-label": label, disabled: !groups[at + by], onclick: () => onbranch(groups[at + by][0]) }, icon(name));
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
