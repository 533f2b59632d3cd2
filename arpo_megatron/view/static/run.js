// The run page: state, tiles, advice and curves; run_sections.js has what is below them.
import { h } from "./dom.js";
import { ago, clock, duration, mean, number, plural, signed, whole } from "./format.js";
import { forgetCharts, lineChart, sparkline } from "./charts.js";
import { groupsOf } from "./metrics.js";
import { coldStart, fold, heldOut, notes, phases, serviceTables, settings } from "./run_sections.js";

export const COLORS = [
  "var(--c1)",
  "var(--c2)",
  "var(--c3)",
  "var(--c4)",
  "var(--c5)",
  "var(--c6)",
  "var(--c7)",
  "var(--c8)",
];
const STATES = { running: "running", finished: "finished", failed: "failed", stopped: "not running" };
const AXES = { step: "steps", time: "wall time", calls: "tool calls executed" };

const largeChart = { key: null };

function last(values) {
  for (let i = (values?.length ?? 0) - 1; i >= 0; i -= 1) {
    if (values[i] !== null && values[i] !== undefined) return values[i];
  }
  return null;
}

/** Return the values of the horizontal axis: steps, seconds since the first event, or calls executed so far. */
function axis(page, kind) {
  const found = page.metrics;
  if (kind === "time") return (found.time ?? []).map((time) => (time === null ? null : time - page.began));
  if (kind === "calls") {
    let sum = 0;
    return (found.tool_calls_executed ?? []).map((calls) => (sum += calls ?? 0));
  }
  return found.step ?? [];
}

/** Return a metric of all steps as {x, y}; held-out success comes from the evaluations, which also has the last one. */
function curve(page, key, kind) {
  const at = axis(page, kind);
  if (key !== "held_out_success") return { x: at, y: page.metrics[key] };
  const steps = page.metrics.step ?? [];
  const x = page.evaluations.map((
    { step },
  ) => (kind === "step" ? step : step === 0 ? 0 : at[steps.indexOf(step)] ?? null));
  return { x, y: page.evaluations.map((one) => one.success) };
}

/**
 * Return the content of the run page.
 * view: {main, shown: [names], pages: {name: page}, services, axis, link(changes), rerender()}.
 */
export function runPage(view) {
  forgetCharts();
  const page = view.pages[view.main];
  const color = (name) => COLORS[view.shown.indexOf(name) % COLORS.length];
  return [
    heading(view, page),
    tiles(page, color(view.main)),
    damagePanel(page),
    advicePanel(page),
    curves(view, color),
    phases(page),
    coldStart(page, color(view.main)),
    serviceTables(page, view.services),
    heldOut(view, page),
    notes(page),
    settings(view),
  ];
}

function heading(view, page) {
  const share = page.steps ? page.step / page.steps : 0;
  const facts = [["recipe", page.recipe], ["method", page.method], ["model", page.model], ["seed", page.seed], [
    "code",
    page.code,
  ]].filter(([, value]) => value !== null);
  return h(
    "section",
    { class: "top" },
    h("h1", {}, view.main, " ", h("span", { class: `pill ${page.state}` }, STATES[page.state])),
    h(
      "p",
      { class: "facts" },
      facts.map(([name, value]) => h("span", {}, h("span", { class: "quiet" }, name), " ", value ?? "–")),
    ),
    h(
      "div",
      { class: "progress" },
      h("progress", { max: 1, value: share, "aria-label": "finished steps" }),
      h("span", {}, `step ${whole(page.step)} of ${whole(page.steps)}`),
      page.eta_s !== null ? h("span", { class: "quiet" }, `about ${duration(page.eta_s)} left`) : null,
      page.phase ? h("span", { class: "quiet" }, `now: ${page.phase}`) : null,
      page.last_event
        ? h(
          "span",
          { class: "quiet", title: clock(page.last_event.time) },
          `last event ${ago(page.last_event.time)}: ${page.last_event.text}`,
        )
        : null,
      page.tree_steps.length ? h("a", { class: "button", href: view.treesLink(view.main) }, "Trees →") : null,
    ),
  );
}

function tiles(page, color) {
  const found = page.metrics, evaluations = page.evaluations;
  const before = evaluations[0], now = evaluations[evaluations.length - 1];
  const change = (values) => {
    const known = (values ?? []).filter((value) => value !== null);
    return known.length > 1
      ? `${signed(last(known) - known[0])} since step ${found.step[values.indexOf(known[0])]}`
      : "";
  };
  const drops = Object.keys(found).filter((name) => name.startsWith("dropped/"));
  const dropped = drops.reduce((sum, name) => sum + found[name].reduce((a, b) => a + (b ?? 0), 0), 0);
  const reasons = drops.map((name) => [name.slice(8).replace("_", " "), found[name].reduce((a, b) => a + (b ?? 0), 0)])
    .filter(([, count]) => count);
  const trees = (found.trees ?? []).reduce((a, b) => a + (b ?? 0), 0);
  const evaluated = evaluations.map((one) => one.success);
  return h(
    "section",
    { class: "tiles", "aria-label": "The main figures" },
    tile("Reward", number(last(found.reward)), change(found.reward), sparkline(found.reward ?? [], color)),
    tile(
      "Held-out success",
      now ? number(now.success, "%") : "–",
      !now
        ? "not measured yet"
        : before !== now
        ? `${number(before.success, "%")} after step ${before.step}; ${now.solved} of ${now.tasks} tasks now`
        : `${now.solved} of ${now.tasks} tasks, after step ${now.step}`,
      sparkline(evaluated, color),
    ),
    tile(
      "Log-prob gap",
      number(last(found.logprob_gap), "nats"),
      "largest difference of trainer and engine",
      sparkline((found.logprob_gap ?? []).map((v) => (v > 0 ? Math.log10(v) : null)), color),
    ),
    tile(
      "Staleness",
      number(last(found.staleness), "versions"),
      last(found.stale_trees)
        ? `${plural(last(found.stale_trees), "tree")} of the step with older parts`
        : "mean age of a trained token",
      sparkline(found.staleness ?? [], color),
    ),
    tile(
      "Trees not trained",
      whole(dropped),
      reasons.length ? reasons.map(([name, count]) => `${whole(count)} ${name}`).join(", ") : `none of ${whole(trees)}`,
      null,
    ),
    tile(
      "Time of a step",
      duration(mean(stepSeconds(found).slice(-5))),
      "mean of the last five",
      sparkline(stepSeconds(found), color),
    ),
  );
}

function tile(title, value, detail, picture) {
  return h(
    "div",
    { class: "tile" },
    h("h2", {}, title),
    h("p", { class: "value" }, value),
    h("p", { class: "quiet" }, detail),
    picture,
  );
}

function stepSeconds(found) {
  const names = Object.keys(found).filter((name) => name.startsWith("seconds/"));
  return (found.step ?? []).map((_, i) => names.reduce((sum, name) => sum + (found[name][i] ?? 0), 0));
}

function damagePanel(page) {
  if (!page.damaged.length) return null;
  const line = (one) =>
    one.rows
      ? `${plural(one.rows, "row")} of ${one.file} left out; the first is ${one.reason}`
      : `${one.file} left out: ${one.reason}`;
  return h(
    "section",
    { class: "advice" },
    h("h2", {}, "Damaged files"),
    page.damaged.map((one) => h("p", {}, line(one))),
  );
}

function advicePanel(page) {
  if (!page.advice.length) return null;
  return h(
    "section",
    { class: "advice" },
    h("h2", {}, "Advice"),
    page.advice.map((one) =>
      h(
        "article",
        {},
        h("h3", {}, one.title),
        h("p", {}, one.detail[0].toUpperCase() + one.detail.slice(1), "."),
        h("p", {}, "Try: ", one.remedy, "."),
        h("p", { class: "quiet" }, "metric ", h("code", {}, one.metric), ", page ", h("code", {}, one.page)),
      )
    ),
  );
}

function curves(view, color) {
  const names = new Set(view.shown.flatMap((name) => Object.keys(view.pages[name].metrics)));
  if (view.shown.some((name) => view.pages[name].evaluations.length)) names.add("held_out_success");
  const xunit = view.axis === "time" ? "s" : "count";
  const single = view.shown.length === 1;
  const choice = h(
    "div",
    { class: "choices", role: "group", "aria-label": "Horizontal axis" },
    h("span", { class: "quiet" }, "over"),
    Object.entries(AXES).map(([key, label]) =>
      h("button", {
        "data-key": `axis ${key}`,
        "aria-pressed": String(view.axis === key),
        onclick: () => view.link({ x: key }),
      }, label)
    ),
  );
  const legend = single ? null : h(
    "div",
    { class: "legend" },
    view.shown.map((name) => h("span", { class: "swatched", vars: { "--c": color(name) } }, name)),
  );
  const isZero = (key) =>
    view.shown.every((name) => (curve(view.pages[name], key, "step").y ?? []).every((value) => !value));
  const draw = (metric) => {
    const series = view.shown.filter((name) => curve(view.pages[name], metric.key, view.axis).y?.length).map((
      name,
    ) => ({
      name,
      color: color(name),
      ...curve(view.pages[name], metric.key, view.axis),
    }));
    const page = view.pages[view.main], at = axis(page, view.axis), steps = page.metrics.step ?? [];
    const markers = page.restarts.map((one) => ({
      x: view.axis === "step"
        ? one.step + 0.5
        : view.axis === "time"
        ? one.time - page.began
        : at[steps.indexOf(one.step)],
      text: `${clock(one.time)} ${one.text}`,
    }));
    return lineChart(series, {
      ...metric,
      xlabel: AXES[view.axis],
      xunit,
      whole: view.axis === "step",
      markers,
      wide: largeChart.key === metric.key,
      onwide: () => {
        largeChart.key = largeChart.key === metric.key ? null : metric.key;
        view.rerender();
      },
    });
  };
  return h(
    "section",
    {},
    h("div", { class: "bar" }, h("h2", {}, "Curves"), choice, legend),
    groupsOf(names, isZero).map((group) =>
      fold(
        `curves ${group.title}`,
        `${group.title}`,
        group.open,
        () => h("div", { class: "charts" }, group.metrics.map(draw)),
        view,
        plural(group.metrics.length, "metric"),
      )
    ),
  );
}
