// The run page: state, tiles, advice, curves, phases, services, held-out tasks, notes and settings.
import { h } from "./dom.js";
import { ago, clock, duration, mean, number, plural, signed, whole } from "./format.js";
import { forgetCharts, lineChart, sparkline, stackedBars } from "./charts.js";
import { groupsOf } from "./metrics.js";

export const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)", "var(--c8)"];
const PHASE_COLORS = { rollout: "var(--c1)", lend: "var(--c7)", logprobs: "var(--c3)", ratios: "var(--c5)", update: "var(--c2)", push: "var(--c4)", save: "var(--c6)" };
const STATES = { running: "running", finished: "finished", failed: "failed", stopped: "not running" };
const AXES = { step: "steps", time: "wall time", calls: "tool calls executed" };

const opened = { wide: null, folds: new Map(), changes: false };

function last(values) {
  for (let i = (values?.length ?? 0) - 1; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

/** Return the values of the horizontal axis: steps, seconds since the first event, or calls executed so far. */
function axis(page, kind) {
  const found = page.metrics;
  if (kind === "time") return (found.time ?? []).map((time) => (time === null ? null : time - page.began));
  if (kind === "calls") { let sum = 0; return (found.tool_calls_executed ?? []).map((calls) => (sum += calls ?? 0)); }
  return found.step ?? [];
}

/** Return a metric of all steps as {x, y}; held-out success comes from the evaluations, which also has the last one. */
function curve(page, key, kind) {
  const at = axis(page, kind);
  if (key !== "held_out_success") return { x: at, y: page.metrics[key] };
  const steps = page.metrics.step ?? [];
  const x = page.evaluations.map(({ step }) => (kind === "step" ? step : step === 0 ? 0 : at[steps.indexOf(step)] ?? null));
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
  const facts = [["recipe", page.recipe], ["method", page.method], ["model", page.model], ["seed", page.seed], ["code", page.code]].filter(([, value]) => value !== null);
  return h("section", { class: "top" },
    h("h1", {}, view.main, " ", h("span", { class: `pill ${page.state}` }, STATES[page.state])),
    h("p", { class: "facts" }, facts.map(([name, value]) => h("span", {}, h("span", { class: "quiet" }, name), " ", value ?? "–"))),
    h("div", { class: "progress" },
      h("progress", { max: 1, value: share, "aria-label": "finished steps" }),
      h("span", {}, `step ${whole(page.step)} of ${whole(page.steps)}`),
      page.eta_s !== null ? h("span", { class: "quiet" }, `about ${duration(page.eta_s)} left`) : null,
      page.phase ? h("span", { class: "quiet" }, `now: ${page.phase}`) : null,
      page.last_event ? h("span", { class: "quiet", title: clock(page.last_event.time) }, `last event ${ago(page.last_event.time)}: ${page.last_event.text}`) : null,
      page.tree_steps.length ? h("a", { class: "button", href: view.treesLink(view.main) }, "Trees →") : null));
}

function tiles(page, color) {
  const found = page.metrics, evaluations = page.evaluations;
  const before = evaluations[0], now = evaluations[evaluations.length - 1];
  const change = (values) => {
    const known = (values ?? []).filter((value) => value !== null);
    return known.length > 1 ? `${signed(last(known) - known[0])} since step ${found.step[values.indexOf(known[0])]}` : "";
  };
  const drops = Object.keys(found).filter((name) => name.startsWith("dropped/"));
  const dropped = drops.reduce((sum, name) => sum + found[name].reduce((a, b) => a + (b ?? 0), 0), 0);
  const reasons = drops.map((name) => [name.slice(8).replace("_", " "), found[name].reduce((a, b) => a + (b ?? 0), 0)]).filter(([, count]) => count);
  const trees = (found.trees ?? []).reduce((a, b) => a + (b ?? 0), 0);
  const evaluated = evaluations.map((one) => one.success);
  return h("section", { class: "tiles", "aria-label": "The main figures" },
    tile("Reward", number(last(found.reward)), change(found.reward), sparkline(found.reward ?? [], color)),
    tile("Held-out success", now ? number(now.success, "%") : "–",
      !now ? "not measured yet" : before !== now ? `${number(before.success, "%")} after step ${before.step}; ${now.solved} of ${now.tasks} tasks now` : `${now.solved} of ${now.tasks} tasks, after step ${now.step}`,
      sparkline(evaluated, color)),
    tile("Log-prob gap", number(last(found.logprob_gap), "nats"), "largest difference of trainer and engine", sparkline((found.logprob_gap ?? []).map((v) => (v > 0 ? Math.log10(v) : null)), color)),
    tile("Staleness", number(last(found.staleness), "versions"), last(found.stale_trees) ? `${plural(last(found.stale_trees), "tree")} of the step with older parts` : "mean age of a trained token", sparkline(found.staleness ?? [], color)),
    tile("Trees not trained", whole(dropped), reasons.length ? reasons.map(([name, count]) => `${whole(count)} ${name}`).join(", ") : `none of ${whole(trees)}`, null),
    tile("Time of a step", duration(mean(stepSeconds(found).slice(-5))), "mean of the last five", sparkline(stepSeconds(found), color)));
}

function tile(title, value, detail, picture) {
  return h("div", { class: "tile" }, h("h2", {}, title), h("p", { class: "value" }, value), h("p", { class: "quiet" }, detail), picture);
}

function stepSeconds(found) {
  const names = Object.keys(found).filter((name) => name.startsWith("seconds/"));
  return (found.step ?? []).map((_, i) => names.reduce((sum, name) => sum + (found[name][i] ?? 0), 0));
}

function advicePanel(page) {
  if (!page.advice.length) return null;
  return h("section", { class: "advice" }, h("h2", {}, "Advice"), page.advice.map((one) => h("article", {},
    h("h3", {}, one.title),
    h("p", {}, one.detail[0].toUpperCase() + one.detail.slice(1), "."),
    h("p", {}, "Try: ", one.remedy, "."),
    h("p", { class: "quiet" }, "metric ", h("code", {}, one.metric), ", page ", h("code", {}, one.page)))));
}

function curves(view, color) {
  const names = new Set(view.shown.flatMap((name) => Object.keys(view.pages[name].metrics)));
  if (view.shown.some((name) => view.pages[name].evaluations.length)) names.add("held_out_success");
  const xunit = view.axis === "time" ? "s" : "count";
  const single = view.shown.length === 1;
  const choice = h("div", { class: "choices", role: "group", "aria-label": "Horizontal axis" }, h("span", { class: "quiet" }, "over"),
    Object.entries(AXES).map(([key, label]) => h("button", { "data-key": `axis ${key}`, "aria-pressed": String(view.axis === key), onclick: () => view.link({ x: key }) }, label)));
  const legend = single ? null : h("div", { class: "legend" }, view.shown.map((name) => h("span", { class: "swatched", vars: { "--c": color(name) } }, name)));
  const isZero = (key) => view.shown.every((name) => (curve(view.pages[name], key, "step").y ?? []).every((value) => !value));
  const draw = (metric) => {
    const series = view.shown.filter((name) => curve(view.pages[name], metric.key, view.axis).y?.length).map((name) => ({
      name, color: color(name), ...curve(view.pages[name], metric.key, view.axis) }));
    const page = view.pages[view.main], at = axis(page, view.axis), steps = page.metrics.step ?? [];
    const markers = page.restarts.map((one) => ({ x: view.axis === "step" ? one.step + 0.5 : view.axis === "time" ? one.time - page.began : at[steps.indexOf(one.step)], text: `${clock(one.time)} ${one.text}` }));
    return lineChart(series, { ...metric, xlabel: AXES[view.axis], xunit, whole: view.axis === "step", markers, wide: opened.wide === metric.key,
      onwide: () => { opened.wide = opened.wide === metric.key ? null : metric.key; view.rerender(); } });
  };
  return h("section", {}, h("div", { class: "bar" }, h("h2", {}, "Curves"), choice, legend),
    groupsOf(names, isZero).map((group) => fold(`curves ${group.title}`, `${group.title}`, group.open, () => h("div", { class: "charts" }, group.metrics.map(draw)), view, plural(group.metrics.length, "metric"))));
}

/** Return a section that opens and closes; its content is made when it is open. */
function fold(key, title, open, content, view, note) {
  const isOpen = opened.folds.get(key) ?? open;
  const details = h("details", { open: isOpen }, h("summary", { "data-key": key }, title, note ? h("span", { class: "quiet" }, ` ${note}`) : null), isOpen ? content() : null);
  details.addEventListener("toggle", () => { if (details.open !== isOpen) { opened.folds.set(key, details.open); view.rerender(); } });
  return details;
}

function phases(page) {
  const found = page.metrics, names = Object.keys(found).filter((name) => name.startsWith("seconds/"));
  if (!names.length) return null;
  const order = Object.keys(PHASE_COLORS);
  const parts = names.map((name) => name.slice(8)).sort((a, b) => order.indexOf(a) - order.indexOf(b))
    .map((name) => ({ name, color: PHASE_COLORS[name] ?? "var(--c8)", y: found[`seconds/${name}`] }));
  const sums = parts.map((part) => part.y.reduce((a, b) => a + (b ?? 0), 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
  const from = Math.max(0, found.step.length - 200);
  return h("section", {}, h("div", { class: "bar" }, h("h2", {}, "Seconds of each step by phase"),
    h("div", { class: "legend" }, parts.map((part, i) => h("span", { class: "swatched", vars: { "--c": part.color } }, `${part.name} ${number(sums[i] / total, "%")}`)))),
    h("figure", { class: "chart wide" }, stackedBars(found.step.slice(from), parts.map((part) => ({ ...part, y: part.y.slice(from) })), page.restarts)),
    page.restarts.length ? h("p", { class: "quiet" }, `${plural(page.restarts.length, "restart")}, drawn as dashed lines.`) : null);
}

function coldStart(page, color) {
  const found = page.sft;
  if (!found.step) return null;
  const draw = (key, label) => (found[key] ? lineChart([{ name: label, color, x: found.step, y: found[key] }],
    { key: `sft ${key}`, label, unit: key.includes("loss") ? "nats" : "", zero: true, xlabel: "updates" }) : null);
  return h("section", {}, h("h2", {}, "Cold start"), h("div", { class: "charts" }, draw("loss", "Loss"), draw("held_out_loss", "Held-out loss"), draw("grad_norm", "Gradient norm")));
}

function serviceTables(page, services) {
  const restarts = page.restarts;
  if (!services?.length && !restarts.length) return null;
  return h("section", {}, h("h2", {}, "Services"),
    services?.length ? table(["service", "state", "for", "process", "restarts", "last error"], services.map((one) => [one.name,
      h("span", { class: one.up ? "good" : one.last_error ? "bad" : "quiet" }, one.up ? "up" : one.last_error ? "down" : "starting"), duration(one.seconds), one.pid ?? "–", one.restarts, one.last_error || "–"])) : null,
    restarts.length ? table(["time", "after step", "service", "restart"], restarts.slice(-50).reverse().map((one) => [clock(one.time), one.step, one.service, one.text])) : null);
}

function table(titles, rows) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, titles.map((title) => h("th", {}, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}

function heldOut(view, page) {
  if (!page.evaluations.length) return null;
  const changes = page.held_out_changes;
  const stored = new Set(page.held_out_tree_steps);
  const step = (one) => (stored.has(one.step) ? h("a", { href: view.treesLink(view.main, `held-out-${one.step}`) }, one.step) : one.step);
  const calls = (one) => Object.entries(one.tool_calls).map(([status, count]) => `${whole(count)} ${status}`).join(", ") || "–";
  const list = (title, tasks, count, css) => h("div", {}, h("h3", { class: css }, `${title}: ${whole(count)}`),
    h("p", { class: "tasks" }, tasks.slice(0, opened.changes ? tasks.length : 24).map((task) => [
      stored.has(changes.last_step) ? h("a", { href: view.treesLink(view.main, `held-out-${changes.last_step}`, task) }, task) : h("span", {}, task), " "])));
  return h("section", {}, h("h2", {}, "Held-out tasks"),
    table(["after step", "success", "solved", "tool calls"], page.evaluations.map((one) => [step(one), number(one.success, "%"), `${one.solved} of ${one.tasks}`, calls(one)])),
    changes ? h("div", { class: "halves" },
      list(`Solved after step ${changes.last_step}, not after step ${changes.first_step}`, changes.gained, changes.gained_count, "good"),
      list(`Solved after step ${changes.first_step}, not after step ${changes.last_step}`, changes.lost, changes.lost_count, "bad"),
      Math.max(changes.gained.length, changes.lost.length) > 24 ? h("button", { "data-key": "changes", onclick: () => { opened.changes = !opened.changes; view.rerender(); } }, opened.changes ? "Show fewer" : "Show all") : null) : null);
}

function notes(page) {
  if (!page.events.length) return null;
  return h("section", {}, h("h2", {}, "Notes and phases"), h("div", { class: "scroll log", "data-scroll": "log", tabindex: 0 },
    table(["time", "kind", "text"], page.events.slice().reverse().map((one) => [clock(one.time), one.kind.replace("_", " "), one.text]))));
}

function settings(view) {
  const shown = view.shown.map((name) => [name, view.pages[name].config]);
  const keys = [...new Set(shown.flatMap(([, config]) => Object.keys(config)))].sort();
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const differing = keys.filter((key) => new Set(shown.map(([, config]) => text(config[key]))).size > 1);
  const rows = (some) => some.map((key) => [h("code", {}, key), ...shown.map(([, config]) => h("code", {}, text(config[key])))]);
  return h("section", {}, h("h2", {}, "Config"),
    shown.length > 1 ? [h("h3", {}, `${plural(differing.length, "key")} with different values`), table(["key", ...shown.map(([name]) => name)], rows(differing))] : null,
    fold("config", shown.length > 1 ? "All keys" : "All keys of this run", false, () => table(["key", ...shown.map(([name]) => name)], rows(keys)), view, plural(keys.length, "key")));
}
