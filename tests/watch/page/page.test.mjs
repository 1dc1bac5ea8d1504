// The dashboard's logic without a browser: node --test tests/watch/page/page.test.mjs

import assert from "node:assert/strict";
import { test } from "node:test";
import * as figures from "../../../src/shoal/watch/page/static/figures.js";
import { Run } from "../../../src/shoal/watch/page/static/run.js";

test("figures have the same formats as in the terminal", () => {
  assert.equal(figures.count(812), "812");
  assert.equal(figures.count(81234), "81.2k");
  assert.equal(figures.count(999960), "1.0M");
  assert.equal(figures.duration(3725), "1h 02m");
  assert.equal(figures.duration(59.6), "1m 00s");
  assert.equal(figures.percent(0.5188), "51.9 %");
  assert.equal(figures.brief(0.00364), "0.0036");
  assert.deepEqual([700, 5e6, 3e9].map(figures.bytes), ["1 KiB", "5 MiB", "2.8 GiB"]);
  for (const write of [figures.count, figures.duration, figures.percent, figures.number, figures.brief]) {
    assert.equal(write(null), "–");
    assert.equal(write(NaN), "–");
  }
});

test("the losses of sites are selected from the curves by name", () => {
  const values = { loss: [1], "loss site-1": [null, 2], reward: [0], "loss site-0": [3, 4] };
  assert.deepEqual(figures.siteLosses(values), [["site-0", [3, 4]], ["site-1", [null, 2]]]);
});

test("verdicts start with their number, and long names are cut in the middle", () => {
  assert.equal(figures.verdicts("", 12), "12 accepted");
  assert.equal(figures.verdicts("proof", 1), "1 rejected: proof");
  assert.equal(figures.ellipsize("words-of-seven-letters-3", 16), "words-of…tters-3");
  assert.equal(figures.ellipsize("tiny-0", 16), "tiny-0");
});

test("ticks are round and within the range", () => {
  assert.deepEqual(figures.ticks(0, 0.76, 4), [0, 0.2, 0.4, 0.6]);
  assert.deepEqual(figures.integerTicks(1, 3, 6), [1, 2, 3]);
  assert.deepEqual(figures.ticks(5, 5), [5]);
  for (const value of figures.ticks(-3.3, 7.7, 5)) assert.ok(value >= -3.3 && value <= 7.7);
});

test("a range starts at 0, holds every value and ignores gaps", () => {
  const [low, high] = figures.range([[0.2, null, 0.8], [undefined, NaN]]);
  assert.equal(low, 0);
  assert.ok(high > 0.8 && high < 0.9);
  assert.deepEqual(figures.range([[]]), [0, 1]);
  assert.ok(figures.range([[-1, 1]])[0] < -1);
});

test("a path leaves a gap where a value is missing", () => {
  const same = (value) => value;
  assert.equal(figures.path([1, 2, 3], [1, null, 3], same, same), "M1.0 1.0M3.0 3.0");
  assert.equal(figures.path([1, 2], [1, 2], same, same), "M1.0 1.0L2.0 2.0");
});

test("smoothing keeps the length of the list and does not change a constant", () => {
  assert.deepEqual(figures.smooth([2, 2, 2, 2]), [2, 2, 2, 2]);
  assert.equal(figures.smooth([null, null, null]).every((value) => value === null), true);
});

test("the nearest value is returned at both ends and in between", () => {
  const xs = [1, 4, 9];
  assert.deepEqual([0, 2, 3, 7, 100].map((x) => figures.nearest(xs, x)), [0, 0, 1, 2, 2]);
  assert.equal(figures.nearest([], 3), -1);
});

test("curves are fetched only when there are new ones", async () => {
  const paths = [];
  const responses = { "/api/overview": { revision: "1.0", overview: { trained: 1 } }, "/api/curves": { curves: { x: [1] } } };
  const run = new Run(async (path) => {
    paths.push(path);
    return responses[path];
  });
  await run.refresh();
  await run.refresh();
  assert.deepEqual(paths, ["/api/overview", "/api/curves", "/api/overview"]);
  assert.deepEqual([run.curves.x, run.overview.trained], [[1], 1]);
  responses["/api/overview"] = { revision: "2.0", overview: { trained: 2 } };
  responses["/api/curves"] = { curves: { x: [1, 2] } };
  await run.refresh();
  assert.deepEqual([run.curves.x, run.overview.trained, paths.length], [[1, 2], 2, 5]);
});
