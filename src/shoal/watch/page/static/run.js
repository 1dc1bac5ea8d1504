// What the page knows of the run. While somebody looks at it, it asks every few seconds; curves only when there are new ones.
//
// The page of a report holds all answers itself and asks nobody.

const KEPT = JSON.parse(globalThis.document?.getElementById("answers")?.textContent ?? "null");
const EVERY_MS = 2000;
export const isReport = KEPT !== null;

export async function ask(path) {
  if (isReport) return KEPT[path.split("?")[0]];
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error || `the server answered ${response.status}`);
  return found;
}

export class Run {
  constructor(asking = ask) {
    this.ask = asking;
    this.seen = null;
  }

  // Bring it up to date.
  async look() {
    const found = await this.ask("/api/overview");
    const curves = found.seen === this.seen ? {} : await this.ask("/api/curves");
    Object.assign(this, curves, found);
  }
}

// Follow a run. `changed()` is called after each look, `state(words)` when the server is lost or back.
export function follow(run, changed, state) {
  if (isReport) return;
  let busy = false;
  const look = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      await run.look();
      state("");
      changed();
    } catch {
      state("The dashboard does not answer; this page keeps what it has and tries again.");
    }
    busy = false;
  };
  setInterval(look, EVERY_MS);
  document.addEventListener("visibilitychange", look);
}
