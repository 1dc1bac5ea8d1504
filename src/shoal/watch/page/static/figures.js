// Formats of figures, and the arithmetic of charts: pure functions, tested by `node --test`.

export const NONE = "–";

export function number(value, digits = 3) {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : value.toFixed(digits);
}

// Three significant digits: 0.00364, 1.73, 412.
export function brief(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return count(value);
  if (size < 0.0005) return value.toExponential(0);
  return String(Number(value.toPrecision(size < 1 ? 2 : 3)));
}

export function percent(value, digits = 1) {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : `${(100 * value).toFixed(digits)} %`;
}

// 812, 81.2k, 8.1M: the format of `shoal.watch.figures`.
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value < 0) return `-${count(-value)}`;
  for (const [limit, unit] of [[1e3, ""], [1e6, "k"], [1e9, "M"], [1e12, "G"]]) {
    if (value < limit * 0.9995) {
      const shown = (value / limit) * 1e3;
      return !unit || shown >= 100 ? `${shown.toFixed(0)}${unit}` : `${shown.toFixed(1)}${unit}`;
    }
  }
  return `${(value / 1e12).toFixed(1)}T`;
}

// 42s, 6m 12s, 3h 05m, 2d 04h.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.max(Math.round(seconds), 0);
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two((whole % 3600) / 60)}m`;
  return `${Math.floor(whole / 86400)}d ${two((whole % 86400) / 3600)}h`;
}

// Shorten a text to `max` characters by cutting its middle, because names differ at their start and end.
export function ellipsize(text, max) {
  const end = Math.floor((max - 1) / 2);
  return text.length <= max ? text : `${text.slice(0, max - 1 - end)}…${text.slice(text.length - end)}`;
}

// "12 accepted", or "3 rejected: proof".
export function verdicts(reason, n) {
  return reason ? `${count(n)} rejected: ${reason}` : `${count(n)} accepted`;
}

export function bytes(value) {
  if (!value) return NONE;
  const mebibytes = value / 1048576;
  if (mebibytes < 1) return `${Math.ceil(value / 1024)} KiB`;
  return mebibytes < 1000 ? `${mebibytes.toFixed(0)} MiB` : `${(mebibytes / 1024).toFixed(1)} GiB`;
}

export function clock(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  return new Date(seconds * 1000).toTimeString().slice(0, 8);
}

// About `count` round values that cover [low, high].
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const values = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    values.push(Number((index * step).toPrecision(12)));
  }
  return values;
}

// Ticks for steps and versions, which are integers.
export function integerTicks(low, high, count = 6) {
  const integers = ticks(low, high, count).filter((value) => Number.isInteger(value));
  return integers.length > 1 ? integers : [...new Set([Math.ceil(low), Math.floor(high)])];
}

// The range of all values with a margin, at least [0, `minHigh`].
export function range(lists, { minHigh = 0 } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null || value === undefined || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, Math.max(minHigh, 1)];
  low = Math.min(low, 0);
  high = Math.max(high, minHigh);
  if (high === low) high = low + (Math.abs(low) || 1);
  return [low < 0 ? low - (high - low) * 0.06 : low, high + (high - low) * 0.06];
}

export function linear([low, high], [from, to]) {
  const slope = high === low ? 0 : (to - from) / (high - low);
  return (value) => from + (value - low) * slope;
}

// The loss at each site by name, from the curves called "loss NAME".
export function siteLosses(values) {
  return Object.keys(values).filter((name) => name.startsWith("loss ")).sort().map((name) => [name.slice(5), values[name]]);
}

// An SVG path through the points, with a gap where a value is missing.
export function path(xs, ys, x, y) {
  let text = "";
  let command = "M";
  for (let index = 0; index < xs.length; index += 1) {
    const value = ys[index];
    if (value === null || value === undefined || !Number.isFinite(value)) {
      command = "M";
      continue;
    }
    text += `${command}${x(xs[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    command = "L";
  }
  return text;
}

export function bandPath(xs, low, high, x, y) {
  const indexes = xs.map((_, index) => index).filter((index) => Number.isFinite(low[index]));
  if (indexes.length < 2) return "";
  const upper = indexes.map((index) => `${x(xs[index]).toFixed(1)} ${y(high[index]).toFixed(1)}`);
  const lower = indexes.reverse().map((index) => `${x(xs[index]).toFixed(1)} ${y(low[index]).toFixed(1)}`);
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

// The centred moving mean of `shoal.watch.plot`: its window is about a tenth of the values, at least three.
export function smooth(values) {
  const half = Math.max(Math.floor(values.length / 20), 1);
  return values.map((_, index) => {
    const window = values.slice(Math.max(index - half, 0), index + half + 1).filter((value) => value !== null && value !== undefined);
    return window.length ? window.reduce((sum, value) => sum + value, 0) / window.length : null;
  });
}

// The index of the value nearest to `x`; -1 if there is none.
export function nearest(xs, x) {
  if (!xs.length) return -1;
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

// The last known value; null if there is none.
export function last(values) {
  for (let index = (values || []).length - 1; index >= 0; index -= 1) {
    if (values[index] !== null && values[index] !== undefined) return values[index];
  }
  return null;
}
