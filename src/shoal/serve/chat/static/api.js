// Requests to this server. Every change carries the session's CSRF token.

let csrf = "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const trust = (token) => { csrf = token ?? ""; };

export async function ask(path, { method = "GET", body, signal, raw } = {}) {
  const headers = method === "GET" ? {} : { "X-CSRF-Token": csrf, "Content-Type": "application/json" };
  const content = body === undefined ? (method === "POST" ? "{}" : undefined) : raw ? body : JSON.stringify(body);
  const response = await fetch(`/chat/${path}`, { method, headers, body: content, signal });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Refused(response.status, answer.error ?? `the server answers ${response.status}`);
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body) => (await ask(path, { method: "POST", body })).json();
export const remove = async (path) => (await ask(path, { method: "DELETE" })).json();
