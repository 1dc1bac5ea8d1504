// Login and registration.

import { post } from "./api.js";
import { h } from "./dom.js";

// `first`: there is no account yet, so the form creates the first one.
export function entry({ registration, first, onenter }) {
  let registering = false;
  const error = h("p.error", { role: "alert", hidden: true });
  const name = h("input.field", { id: "name", name: "username", autocomplete: "username", required: true, maxlength: "64", autocapitalize: "none", spellcheck: "false" });
  const password = h("input.field", { id: "password", type: "password", required: true, maxlength: "256", autocomplete: "current-password" });
  const hint = h("p.hint", { id: "hint", hidden: true }, "At least 10 characters. A sentence is easy to remember.");
  const title = h("h1", {}, "Welcome back");
  const submitButton = h("button.primary", { type: "submit" }, "Log in");
  const toggleButton = h("button.quiet", { type: "button", onclick: toggle }, "New here? Create an account");

  function toggle() {
    registering = !registering;
    title.textContent = registering ? (first ? "Create the first account" : "Create an account") : "Welcome back";
    submitButton.textContent = registering ? "Create account" : "Log in";
    toggleButton.textContent = registering ? "I have an account" : "New here? Create an account";
    password.autocomplete = registering ? "new-password" : "current-password";
    password.setAttribute("aria-describedby", registering ? "hint" : "");
    hint.hidden = !registering;
    error.hidden = true;
    name.focus();
  }
  if (first && registration) toggle();

  async function submit(event) {
    event.preventDefault();
    submitButton.disabled = true;
    error.hidden = true;
    try {
      onenter(await post(registering ? "register" : "login", { name: name.value.trim(), password: password.value }));
    } catch (refused) {
      error.textContent = refused.message;
      error.hidden = false;
      submitButton.disabled = false;
      password.focus();
    }
  }

  return h("main.entry", {},
    h("form.card", { onsubmit: submit },
      h("img.logo", { src: "/static/shoal.svg", alt: "", width: "44", height: "44" }),
      title,
      h("p.lead", {}, "Talk to the model, and check every reply."),
      h("label", { for: "name" }, "Name or email"), name,
      h("label", { for: "password" }, "Password"), password, hint,
      error, submitButton,
      registration && !first ? toggleButton : null));
}
