// The page's copy of the run. It polls the server while the page is visible, and fetches curves only when they are new.
//
// The page of a report has all responses embedded and makes no requests.

const EMBEDDED = JSON.parse(globalThis.document?.getElementById("responses")?.textContent ?? "null");
const EVERY_MS = 2000;
export const isReport = EMBEDDED !== null;

export async function fetchJson(path) {
  if (isReport) return EMBEDDED[path.split("?")[0]];
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || `the server responded with status ${response.status}`);
  return body;
}

export class Run {
  constructor(fetcher = fetchJson) {
    this.fetch = fetcher;
    this.revision = null; // changes when there are new curves
  }

  async refresh() {
    const overview = await this.fetch("/api/overview");
    const curves = overview.revision === this.revision ? {} : await this.fetch("/api/curves");
    Object.assign(this, curves, overview);
  }
}

// Poll a run. Call `onchange()` after each refresh, and `onnotice(text)` when the server is lost or back.
export function follow(run, onchange, onnotice) {
  if (isReport) return;
  let busy = false;
  const refresh = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      await run.refresh();
      onnotice("");
      onchange();
    } catch {
      onnotice("The dashboard's server does not respond. This page keeps its data and tries again.");
    }
    busy = false;
  };
  setInterval(refresh, EVERY_MS);
  document.addEventListener("visibilitychange", refresh);
}
