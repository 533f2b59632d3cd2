// Line charts, stacked bars and sparklines in SVG.
import { h, hint, s } from "./dom.js";
import { number } from "./format.js";

const PAD = { left: 46, right: 10, top: 8, bottom: 22 };
const charts = new Set();

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

function bounds(values, options) {
  if (options.range) return options.range;
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!values.length) return [0, 1];
  if (options.zero) low = Math.min(0, low);
  if (low === high) {
    return options.zero && low === 0 ? [0, 1] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  }
  const room = (high - low) * 0.06;
  return [options.zero && low === 0 ? 0 : low - room, high + room];
}

/**
 * Return a chart of several lines with a readout under its title.
 * series: [{name, color, x: [], y: []}] with null for unknown values; options: label, unit, range, zero, log, points,
 * xlabel, xunit, markers [{x, text}], wide, key, onwide.
 */
export function lineChart(series, options) {
  const wide = options.wide, width = wide ? 1120 : 360, height = wide ? 340 : 168;
  const log = options.log;
  const tone = (value) => (log ? Math.log10(value) : value);
  const usable = (value) => value !== null && value !== undefined && (!log || value > 0);
  const points = series.map(({ x, y }) =>
    x.map((at, i) => [at, y[i]]).filter(([at, value]) => at !== null && usable(value))
  );
  const flat = points.flat();
  const [low, high] = log
    ? bounds(flat.map(([, value]) => tone(value)), {})
    : bounds(flat.map(([, value]) => value), options);
  const xs = flat.map(([at]) => at);
  let [first, last] = xs.length ? [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))] : [0, 1];
  if (first === last) {
    first -= 0.5;
    last += 0.5;
  }
  const px = (at) => PAD.left + ((at - first) / (last - first)) * (width - PAD.left - PAD.right);
  const py = (value) =>
    height - PAD.bottom - ((tone(value) - low) / (high - low || 1)) * (height - PAD.top - PAD.bottom);

  const grid = log
    ? ticks(Math.floor(low), Math.ceil(high), 3).filter(Number.isInteger).filter((at) => at >= low && at <= high).map((
      at,
    ) => 10 ** at)
    : ticks(low, high, wide ? 6 : 3);
  const rows = grid.map((at) => [
    s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: py(at), y2: py(at) }),
    s("text", { class: "axis", x: PAD.left - 6, y: py(at) + 3.5, "text-anchor": "end" }, axisText(at, options.unit)),
  ]);
  const marks = ticks(first, last, wide ? 10 : 4).filter((at) => !options.whole || Number.isInteger(at)).map((at) =>
    s(
      "text",
      { class: "axis", x: px(at), y: height - 6, "text-anchor": "middle" },
      number(at, options.xunit ?? "count"),
    )
  );
  const restarts = (options.markers ?? []).filter(({ x }) => x >= first && x <= last).map(({ x, text }) =>
    s("line", { class: "marker", x1: px(x), x2: px(x), y1: PAD.top, y2: height - PAD.bottom }, s("title", {}, text))
  );
  const lines = points.map((own, i) => {
    const path = own.map(([at, value], j) => `${j ? "L" : "M"}${px(at).toFixed(1)} ${py(value).toFixed(1)}`).join("");
    const dots = own.length === 1 || options.points
      ? own.map(([at, value]) =>
        s("circle", { cx: px(at), cy: py(value), r: 2.6, class: "dot", vars: { "--c": series[i].color } })
      )
      : [];
    return [s("path", { d: path, class: "line", vars: { "--c": series[i].color } }), dots];
  });
  const cursor = s("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
  const readout = h("span", { class: "readout" });
  const nearest = (own, at) =>
    own.reduce((best, each) => (best === null || Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best), null);
  const say = (at) => {
    const parts = points.map((own, i) => [series[i], at === null ? own[own.length - 1] : nearest(own, at)]).filter((
      [, point],
    ) => point);
    readout.replaceChildren(
      ...parts.slice(0, 4).map(([one, [, value]]) =>
        h(
          "span",
          { vars: { "--c": one.color }, class: series.length > 1 ? "swatched" : "" },
          number(value, options.unit),
        )
      ),
      parts.length > 4 ? h("span", {}, `${parts.length - 4} more`) : "",
    );
    cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) {
      cursor.setAttribute("x1", px(at));
      cursor.setAttribute("x2", px(at));
    }
  };
  say(null);
  const label = `${options.label}: ${
    flat.length
      ? `from ${number(flat[0][1], options.unit)} to ${number(flat[flat.length - 1][1], options.unit)}`
      : "no values yet"
  }`;
  const picture = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    rows,
    marks,
    restarts,
    lines,
    cursor,
    flat.length
      ? null
      : s("text", { class: "axis", x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values yet"),
  );
  const self = { say: (at) => (at === null ? say(null) : flat.length && say(nearest(points.flat(), at)[0])) };
  charts.add(self);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = first +
      (((event.clientX - box.left) / box.width) * width - PAD.left) / (width - PAD.left - PAD.right) * (last - first);
    const here = nearest(flat, at);
    for (const chart of charts) chart.say(here ? here[0] : null);
    if (here) {
      hint([
        [options.xlabel, number(here[0], options.xunit ?? "count")],
        ...series.map((
          one,
          i,
        ) => [one.name, points[i].length ? number(nearest(points[i], here[0])[1], options.unit) : "–"]),
      ], { left: event.clientX + 12, bottom: event.clientY, top: event.clientY });
    }
  });
  picture.addEventListener("pointerleave", () => {
    for (const chart of charts) chart.say(null);
    hint(null);
  });
  return h(
    "figure",
    { class: wide ? "chart wide" : "chart" },
    h(
      "figcaption",
      {},
      h("button", {
        class: "plain",
        "data-key": `chart ${options.key}`,
        title: `${options.key}: ${wide ? "make it small" : "make it large"}`,
        onclick: options.onwide,
      }, options.label),
      readout,
    ),
    picture,
  );
}

function axisText(value, unit) {
  if (unit === "%") return `${Number((100 * value).toPrecision(3))}%`;
  return number(value, unit === "count" ? "count" : "");
}

/** Forget the charts of a page that is about to be replaced. */
export function forgetCharts() {
  charts.clear();
}

/** Return a small line without axes. */
export function sparkline(values, color) {
  const known = values.map((value, i) => [i, value]).filter(([, value]) => value !== null && value !== undefined);
  if (known.length < 2) return null;
  const all = known.map(([, value]) => value);
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  const at = ([i, value]) =>
    `${(2 + (i / (values.length - 1)) * 116).toFixed(1)} ${(24 - ((value - low) / (high - low || 1)) * 20).toFixed(1)}`;
  return s(
    "svg",
    { class: "spark", viewBox: "0 0 120 28", "aria-hidden": "true", preserveAspectRatio: "none" },
    s("path", {
      class: "line",
      d: known.map((each, i) => `${i ? "L" : "M"}${at(each)}`).join(""),
      vars: { "--c": color },
    }),
  );
}

/** Return stacked bars, one per step. parts: [{name, color, y: []}] in seconds. */
export function stackedBars(steps, parts, markers) {
  const width = 1120, height = 220, count = steps.length;
  const totals = steps.map((_, i) => parts.reduce((sum, part) => sum + (part.y[i] ?? 0), 0));
  const high = totals.reduce((a, b) => Math.max(a, b), 0) || 1;
  const slot = (width - PAD.left - PAD.right) / Math.max(1, count), bar = Math.min(46, Math.max(0.8, slot * 0.82));
  const py = (value) => height - PAD.bottom - (value / (high * 1.05)) * (height - PAD.top - PAD.bottom);
  const x = (i) => PAD.left + slot * (i + 0.5);
  const columns = steps.map((step, i) => {
    let below = 0;
    const rects = parts.map((part) => {
      const value = part.y[i] ?? 0, top = py(below + value), bottom = py(below);
      below += value;
      return value > 0
        ? s("rect", {
          x: x(i) - bar / 2,
          width: bar,
          y: top,
          height: Math.max(0, bottom - top),
          class: "fill",
          vars: { "--c": part.color },
        })
        : null;
    });
    const explain = (event) =>
      hint([["step", step], ...parts.filter((part) => part.y[i]).map((part) => [part.name, number(part.y[i], "s")]), [
        "sum",
        number(totals[i], "s"),
      ]], { left: event.clientX + 12, bottom: event.clientY, top: event.clientY });
    return s(
      "g",
      { onpointermove: explain, onpointerleave: () => hint(null) },
      s("rect", { x: x(i) - slot / 2, width: slot, y: PAD.top, height: height - PAD.top - PAD.bottom, class: "catch" }),
      rects,
    );
  });
  const every = Math.ceil(count / 14);
  return s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Seconds of each step by phase" },
    ticks(0, high * 1.05, 4).map((
      at,
    ) => [
      s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: py(at), y2: py(at) }),
      s("text", { class: "axis", x: PAD.left - 6, y: py(at) + 3.5, "text-anchor": "end" }, number(at, "s")),
    ]),
    columns,
    steps.map((
      step,
      i,
    ) => (i % every ? null : s("text", { class: "axis", x: x(i), y: height - 6, "text-anchor": "middle" }, step))),
    markers.map(({ step, text }) => {
      const i = steps.findIndex((each) => each > step);
      const at = i < 0 ? width - PAD.right : x(i) - slot / 2;
      return s("line", { class: "marker", x1: at, x2: at, y1: PAD.top, y2: height - PAD.bottom }, s("title", {}, text));
    }),
  );
}
