// The message field and the options of a reply: version, comparison, thinking budget, the run's prompt.

import { h, icon } from "./dom.js";

const MAX_HEIGHT_PX = 260;

export function composer({ models, onsend, onstop }) {
  let comparing = false, target = 0;
  const text = h("textarea", { id: "message", rows: "1", placeholder: "Message", "aria-label": "Message", maxlength: "100000" });
  const send = h("button.send", { "aria-label": "Send", type: "submit" }, icon("send"));
  const stop = h("button.send", { "aria-label": "Stop", type: "button", hidden: true, onclick: onstop }, icon("stop"));
  const first = h("select.version", { "aria-label": "Version" });
  const second = h("select.version", { "aria-label": "Second version", hidden: true });
  const compare = h("button.quiet", { type: "button", "aria-pressed": "false", onclick: () => {
    comparing = !comparing;
    compare.setAttribute("aria-pressed", String(comparing));
    second.hidden = !comparing;
  } }, icon("columns"), "Compare");

  const budget = h("div.budgets", { role: "radiogroup", "aria-label": "Think for this many tokens" }, h("span.label", { "aria-hidden": "true" }, "Think"));
  for (const tokens of [0, ...models.targets]) {
    const input = h("input", { type: "radio", name: "target", value: String(tokens), checked: tokens === 0, onchange: () => { target = tokens; } });
    budget.append(h("label", {}, input, h("span", {}, tokens ? short(tokens) : "Auto")));
  }
  const trained = h("input", { type: "checkbox", checked: true });
  const asTrained = h("label.checkbox", { title: "With the run's system prompt, and its template around your message" }, trained, "As in training");

  function fill(newModels) {
    models = newModels;
    for (const [select, fallback] of [[first, models.name], [second, models.versions.at(-1)?.id]]) {
      const selected = select.value || fallback;
      const newest = models.newest && models.newest !== models.name ? `Newest (${label(models.newest)})` : models.name;
      select.replaceChildren(h("option", { value: models.name }, newest),
        ...models.versions.filter(({ id }) => id !== models.name).map(({ id, version }) => h("option", { value: id }, version === 0 ? "Before training" : label(id))));
      select.value = [...select.options].some((option) => option.value === selected) ? selected : models.name;
    }
    first.hidden = compare.hidden = models.versions.length < 2;
  }
  const label = (id) => (id.includes("@") ? `version ${id.split("@").at(-1)}` : id);

  const fit = () => {
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight, MAX_HEIGHT_PX)}px`;
    send.disabled = !text.value.trim();
  };
  text.addEventListener("input", fit);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  const form = h("form.composer", { onsubmit: (event) => {
    event.preventDefault();
    const content = text.value.trim();
    if (!content || !stop.hidden) return;
    text.value = "";
    fit();
    onsend(content);
  } },
    h("div.box", {}, text, h("div.tools", {}, first, compare, second, models.targets.length ? budget : null, models.as_trained ? asTrained : null, stop, send)),
    h("p.hint", {}, "Small models are often wrong. Every reply has a proof of its weights, prompt and seed."));
  fill(models);
  fit();

  return {
    element: form, text, fill,
    setBusy(busy) { stop.hidden = !busy; send.hidden = busy; },
    options: () => ({
      models: comparing ? [first.value, second.value] : [first.value],
      target,
      as_trained: models.as_trained && trained.checked,
      temperature: models.temperature,
    }),
  };
}

const short = (tokens) => (tokens >= 1000 && tokens % 500 === 0 ? `${tokens / 1000}k` : String(tokens));
