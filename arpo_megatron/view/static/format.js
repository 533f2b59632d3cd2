// Numbers with units.

/** Return a number of a metric as text; `unit` is one of "%", "s", "nats", "GB", "count" or text to append. */
export function number(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (unit === "%") return `${(100 * value).toFixed(Math.abs(value) < 0.1 && value !== 0 ? 1 : 0)}%`;
  if (unit === "s") return duration(value);
  const text = unit === "count" ? counted(value) : plain(value);
  return unit && unit !== "count" ? `${text} ${unit}` : text;
}

function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

function counted(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return String(Math.round(10 * value) / 10);
}

/** Return whole numbers with separators: 12,345. */
export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** Return a sign in front of a number with two decimals. */
export function signed(value) {
  return value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
}

/** Return seconds as text with one unit, or two for long times. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0005) return "0 s";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Return how long ago a moment (seconds since the epoch) was. */
export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  return seconds < 2 ? "just now" : `${duration(Math.round(seconds))} ago`;
}

/** Return the local time of a moment (seconds since the epoch). */
export function clock(time) {
  const date = new Date(1000 * time);
  const pad = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${
    pad(date.getMinutes())
  }:${pad(date.getSeconds())}`;
}

/** Return the name of a step in an address: N, or held-out-N for the evaluation after it. */
export function stepName(step) {
  return step.startsWith("held-out-") ? `held-out tasks after step ${step.slice(9)}` : `step ${step}`;
}

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Return "1 fork", "3 forks", "2 keys" or "2 trajectories". */
export function plural(count, noun) {
  const many = /[^aeiou]y$/.test(noun) ? `${noun.slice(0, -1)}ies` : `${noun}s`;
  return `${whole(count)} ${count === 1 ? noun : many}`;
}
