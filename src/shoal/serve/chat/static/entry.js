// Login and registration.

import { post } from "./api.js";
import { h } from "./dom.js";

// `first`: there is no account yet, so the first one is created.
export function entry({ registration, first, onenter }) {
  let fresh = false;
  const error = h("p.error", { role: "alert", hidden: true });
  const name = h("input.field", { id: "name", name: "username", autocomplete: "username", required: true, maxlength: "64", autocapitalize: "none", spellcheck: "false" });
  const password = h("input.field", { id: "password", type: "password", required: true, maxlength: "256", autocomplete: "current-password" });
  const hint = h("p.hint", { id: "hint", hidden: true }, "At least 10 characters. A sentence is easy to remember.");
  const title = h("h1", {}, "Welcome back");
  const go = h("button.primary", { type: "submit" }, "Log in");
  const other = h("button.quiet", { type: "button", onclick: swap }, "New here? Create an account");

  function swap() {
    fresh = !fresh;
    title.textContent = fresh ? (first ? "Create the first account" : "Create an account") : "Welcome back";
    go.textContent = fresh ? "Create account" : "Log in";
    other.textContent = fresh ? "I have an account" : "New here? Create an account";
    password.autocomplete = fresh ? "new-password" : "current-password";
    password.setAttribute("aria-describedby", fresh ? "hint" : "");
    hint.hidden = !fresh;
    error.hidden = true;
    name.focus();
  }
  if (first && registration) swap();

  async function submit(event) {
    event.preventDefault();
    go.disabled = true;
    error.hidden = true;
    try {
      onenter(await post(fresh ? "register" : "login", { name: name.value.trim(), password: password.value }));
    } catch (refused) {
      error.textContent = refused.message;
      error.hidden = false;
      go.disabled = false;
      password.focus();
    }
  }

  return h("main.entry", {},
    h("form.card", { onsubmit: submit },
      h("img.mark", { src: "/static/shoal.svg", alt: "", width: "44", height: "44" }),
      title,
      h("p.lead", {}, "Talk to the model, and check every reply."),
      h("label", { for: "name" }, "Name or email"), name,
      h("label", { for: "password" }, "Password"), password, hint,
      error, go,
      registration && !first ? other : null));
}
