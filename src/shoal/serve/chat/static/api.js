// Requests to this server. Every change carries the session's CSRF token.

let csrf = "";

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setCsrfToken = (token) => { csrf = token ?? ""; };

export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = method === "GET" ? {} : { "X-CSRF-Token": csrf, "Content-Type": "application/json" };
  const content = method === "POST" ? JSON.stringify(body ?? {}) : undefined;
  const response = await fetch(`/chat/${path}`, { method, headers, body: content, signal });
  if (response.ok) return response;
  const error = await response.json().catch(() => ({}));
  throw new RequestError(response.status, error.error ?? `the server responded with status ${response.status}`);
}

export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await request(path, { method: "POST", body })).json();
export const remove = async (path) => (await request(path, { method: "DELETE" })).json();
