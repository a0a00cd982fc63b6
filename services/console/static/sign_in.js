// The sign-in form, when the token is missing, stale or not allowed here.

import { fill, h } from "./lib/dom.js";
import { field } from "./lib/parts.js";

/** Say what happened, where the link is, and take a token. */
export function showSignIn(main, error) {
  const token = h("input", { name: "token", type: "password", required: true, autocomplete: "off", spellcheck: "false" });
  fill(
    main,
    h("section", { class: "signin" },
      h("h1", {}, "Sign in"),
      h("p", { role: "alert" }, error.message),
      error.cure ? h("p", {}, error.cure) : null,
      h("p", {}, "The console prints a link with its token when it starts: in the output of ", h("code", {}, "seamflow train"), " or ", h("code", {}, "seamflow console"), ". A console that was started again has a new token."),
      h("form", { method: "get", action: "./" }, field("Token", token), h("button", { class: "button primary" }, "Sign in"))),
  );
}
