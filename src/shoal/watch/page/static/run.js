// What the page knows of the run: opened once, then kept current by the stream of events.
//
// The browser reconnects by itself and names the last event it got (Last-Event-ID), so nothing is missed. A step or evaluation
// that comes twice is taken once. The page of a report holds all answers itself and asks nobody.

const KEPT = JSON.parse(globalThis.document?.getElementById("answers")?.textContent ?? "null");
export const isReport = KEPT !== null;

export class Run {
  constructor(opened) {
    Object.assign(this, opened);
  }

  addStep(point) {
    const { x, t, ...values } = point;
    const curves = this.curves;
    const at = curves.x.indexOf(x);
    if (at < 0 && curves.x.length && x < curves.x[curves.x.length - 1]) return false; // inside a bucket
    const place = at < 0 ? curves.x.length : at;
    curves.x[place] = x;
    curves.t[place] = t;
    for (const name of new Set([...Object.keys(curves.values), ...Object.keys(values)])) {
      const list = (curves.values[name] ??= new Array(place).fill(null));
      list[place] = values[name] ?? null;
      for (const edge of [curves.low[name], curves.high[name]]) if (edge) edge[place] = list[place];
    }
    return true;
  }

  addEvaluation(found) {
    const same = (other) => other.x === found.x && other.final === found.final;
    this.evaluations = [...this.evaluations.filter((other) => !same(other)), found];
    this.evaluations.sort((a, b) => a.x - b.x || a.final - b.final);
  }
}

export async function ask(path) {
  if (isReport) return KEPT[path.split("?")[0]];
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error || `the server answered ${response.status}`);
  return found;
}

// Follow a run. `changed(kind)` is called after each change, `state(words)` when the connection is lost or back.
export function follow(run, changed, state) {
  if (isReport) return null;
  const stream = new EventSource(`/api/events?seen=${run.seen}`);
  stream.addEventListener("step", (event) => {
    run.addStep(JSON.parse(event.data));
    changed("step");
  });
  stream.addEventListener("evaluation", (event) => {
    run.addEvaluation(JSON.parse(event.data));
    changed("evaluation");
  });
  stream.addEventListener("overview", (event) => {
    run.overview = JSON.parse(event.data);
    changed("overview");
  });
  stream.addEventListener("reopen", async () => {
    Object.assign(run, await ask("/api/open"));
    changed("step");
  });
  stream.onopen = () => state("");
  stream.onerror = () => state("The dashboard does not answer; this page keeps what it has and tries again.");
  return stream;
}
