// The message field and what a reply is asked with: version, comparison, thinking budget.

import { h, icon } from "./dom.js";

export function composer({ models, onsend, onstop }) {
  const settings = { compare: false, target: 0 };
  const text = h("textarea", { id: "message", rows: "1", placeholder: "Message", "aria-label": "Message", maxlength: "100000" });
  const send = h("button.send", { "aria-label": "Send", type: "submit" }, icon("send"));
  const stop = h("button.send", { "aria-label": "Stop", type: "button", hidden: true, onclick: onstop }, icon("stop"));
  const choice = (label) => h("select.version", { "aria-label": label });
  const first = choice("Version");
  const second = choice("Second version");
  const compare = h("button.quiet", { type: "button", "aria-pressed": "false", onclick: () => {
    settings.compare = !settings.compare;
    compare.setAttribute("aria-pressed", String(settings.compare));
    second.hidden = !settings.compare;
  } }, icon("columns"), "Compare");
  second.hidden = true;

  const budget = h("div.budgets", { role: "radiogroup", "aria-label": "Think for this many tokens" });
  if (models.targets.length) {
    budget.append(h("span.label", { "aria-hidden": "true" }, "Think"));
    for (const target of [0, ...models.targets]) {
      const input = h("input", { type: "radio", name: "target", value: String(target), checked: target === 0, onchange: () => { settings.target = target; } });
      budget.append(h("label", {}, input, h("span", {}, target ? short(target) : "Auto")));
    }
  }
  const trained = h("input", { type: "checkbox", checked: true });
  const asTrained = models.as_trained ? h("label.check", { title: "With the run's system prompt and its template around your words" }, trained, "As in training") : null;

  function fill(next) {
    models = next;
    for (const [select, fallback] of [[first, models.name], [second, models.versions.at(-1)?.id]]) {
      const old = select.value || fallback;
      const newest = models.newest && models.newest !== models.name ? `Newest (${label(models.newest)})` : models.name;
      select.replaceChildren(h("option", { value: models.name }, newest),
        ...models.versions.filter((one) => one.id !== models.name).map((one) => h("option", { value: one.id }, one.version === 0 ? "Before training" : label(one.id))));
      select.value = [...select.options].some((option) => option.value === old) ? old : models.name;
    }
    const many = models.versions.length > 1;
    compare.hidden = !many;
    first.hidden = !many;
  }
  const label = (id) => (id.includes("@") ? `version ${id.split("@").at(-1)}` : id);

  const fit = () => {
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight, 260)}px`;
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
    h("div.box", {}, text, h("div.tools", {}, first, compare, second, models.targets.length ? budget : null, asTrained, h("span.gap"), stop, send)),
    h("p.hint", {}, "Small models are often wrong. Every reply carries a proof of where it came from."));
  fill(models);
  fit();

  return {
    element: form, text, fill,
    busy(is) { stop.hidden = !is; send.hidden = is; },
    asked: () => ({
      models: settings.compare ? [first.value, second.value] : [first.value],
      target: settings.target,
      as_trained: models.as_trained && trained.checked,
      temperature: models.temperature,
    }),
    put(content) { text.value = content; fit(); text.focus(); },
  };
}

const short = (target) => (target >= 1000 && target % 500 === 0 ? `${target / 1000}k` : String(target));
