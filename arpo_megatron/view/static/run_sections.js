// Sections of the run page below its curves: phases, cold start, services, held-out tasks, notes and settings.
import { h } from "./dom.js";
import { clock, duration, number, plural, whole } from "./format.js";
import { lineChart, stackedBars } from "./charts.js";

const PHASE_COLORS = {
  rollout: "var(--c1)",
  lend: "var(--c7)",
  logprobs: "var(--c3)",
  ratios: "var(--c5)",
  update: "var(--c2)",
  push: "var(--c4)",
  save: "var(--c6)",
};

const opened = { folds: new Map(), changes: false };

/** Return a section that opens and closes; its content is made when it is open. */
export function fold(key, title, open, content, view, note) {
  const isOpen = opened.folds.get(key) ?? open;
  const details = h(
    "details",
    { open: isOpen },
    h("summary", { "data-key": key }, title, note ? h("span", { class: "quiet" }, ` ${note}`) : null),
    isOpen ? content() : null,
  );
  details.addEventListener("toggle", () => {
    if (details.open !== isOpen) {
      opened.folds.set(key, details.open);
      view.rerender();
    }
  });
  return details;
}

export function phases(page) {
  const found = page.metrics, names = Object.keys(found).filter((name) => name.startsWith("seconds/"));
  if (!names.length) return null;
  const order = Object.keys(PHASE_COLORS);
  const parts = names.map((name) => name.slice(8)).sort((a, b) => order.indexOf(a) - order.indexOf(b))
    .map((name) => ({ name, color: PHASE_COLORS[name] ?? "var(--c8)", y: found[`seconds/${name}`] }));
  const sums = parts.map((part) => part.y.reduce((a, b) => a + (b ?? 0), 0)),
    total = sums.reduce((a, b) => a + b, 0) || 1;
  const from = Math.max(0, found.step.length - 200);
  return h(
    "section",
    {},
    h(
      "div",
      { class: "bar" },
      h("h2", {}, "Seconds of each step by phase"),
      h(
        "div",
        { class: "legend" },
        parts.map((part, i) =>
          h("span", { class: "swatched", vars: { "--c": part.color } }, `${part.name} ${number(sums[i] / total, "%")}`)
        ),
      ),
    ),
    h(
      "figure",
      { class: "chart wide" },
      stackedBars(found.step.slice(from), parts.map((part) => ({ ...part, y: part.y.slice(from) })), page.restarts),
    ),
    page.restarts.length
      ? h("p", { class: "quiet" }, `${plural(page.restarts.length, "restart")}, drawn as dashed lines.`)
      : null,
  );
}

export function coldStart(page, color) {
  const found = page.sft;
  if (!found.step) return null;
  const draw = (
    key,
    label,
  ) => (found[key]
    ? lineChart([{ name: label, color, x: found.step, y: found[key] }], {
      key: `sft ${key}`,
      label,
      unit: key.includes("loss") ? "nats" : "",
      zero: true,
      xlabel: "updates",
    })
    : null);
  return h(
    "section",
    {},
    h("h2", {}, "Cold start"),
    h(
      "div",
      { class: "charts" },
      draw("loss", "Loss"),
      draw("held_out_loss", "Held-out loss"),
      draw("grad_norm", "Gradient norm"),
    ),
  );
}

export function serviceTables(page, services) {
  const restarts = page.restarts;
  if (!services?.length && !restarts.length) return null;
  return h(
    "section",
    {},
    h("h2", {}, "Services"),
    services?.length
      ? table(
        ["service", "state", "for", "process", "restarts", "last error"],
        services.map((
          one,
        ) => [
          one.name,
          h(
            "span",
            { class: one.up ? "good" : one.last_error ? "bad" : "quiet" },
            one.up ? "up" : one.last_error ? "down" : "starting",
          ),
          duration(one.seconds),
          one.pid ?? "–",
          one.restarts,
          one.last_error || "–",
        ]),
      )
      : null,
    restarts.length
      ? table(
        ["time", "after step", "service", "restart"],
        restarts.slice(-50).reverse().map((one) => [clock(one.time), one.step, one.service, one.text]),
      )
      : null,
    restarts.length > 50 ? h("p", { class: "quiet" }, `${whole(restarts.length - 50)} earlier restarts.`) : null,
  );
}

function table(titles, rows) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, titles.map((title) => h("th", {}, title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))),
    ),
  );
}

export function heldOut(view, page) {
  if (!page.evaluations.length) return null;
  const changes = page.held_out_changes;
  const stored = new Set(page.held_out_tree_steps);
  const step = (
    one,
  ) => (stored.has(one.step)
    ? h("a", { href: view.treesLink(view.main, `held-out-${one.step}`) }, one.step)
    : one.step);
  const calls = (one) =>
    Object.entries(one.tool_calls).map(([status, count]) => `${whole(count)} ${status}`).join(", ") || "–";
  const list = (title, tasks, count, css) =>
    h(
      "div",
      {},
      h("h3", { class: css }, `${title}: ${whole(count)}`),
      h(
        "p",
        { class: "tasks" },
        tasks.slice(0, opened.changes ? tasks.length : 24).map((task) => [
          stored.has(changes.last_step)
            ? h("a", { href: view.treesLink(view.main, `held-out-${changes.last_step}`, task) }, task)
            : h("span", {}, task),
          " ",
        ]),
      ),
    );
  return h(
    "section",
    {},
    h("h2", {}, "Held-out tasks"),
    table(
      ["after step", "success", "solved", "tool calls"],
      page.evaluations.map((one) => [step(one), number(one.success, "%"), `${one.solved} of ${one.tasks}`, calls(one)]),
    ),
    changes
      ? h(
        "div",
        { class: "halves" },
        list(
          `Solved after step ${changes.last_step}, not after step ${changes.first_step}`,
          changes.gained,
          changes.gained_count,
          "good",
        ),
        list(
          `Solved after step ${changes.first_step}, not after step ${changes.last_step}`,
          changes.lost,
          changes.lost_count,
          "bad",
        ),
        Math.max(changes.gained.length, changes.lost.length) > 24
          ? h("button", {
            "data-key": "changes",
            onclick: () => {
              opened.changes = !opened.changes;
              view.rerender();
            },
          }, opened.changes ? "Show fewer" : "Show all")
          : null,
      )
      : null,
  );
}

export function notes(page) {
  if (!page.events.length) return null;
  return h(
    "section",
    {},
    h("h2", {}, "Notes and phases"),
    h(
      "div",
      { class: "scroll log", "data-scroll": "log", tabindex: 0 },
      table(
        ["time", "kind", "text"],
        page.events.slice().reverse().map((one) => [clock(one.time), one.kind.replace("_", " "), one.text]),
      ),
    ),
  );
}

export function settings(view) {
  const shown = view.shown.map((name) => [name, view.pages[name].config]);
  const keys = [...new Set(shown.flatMap(([, config]) => Object.keys(config)))].sort();
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const differing = keys.filter((key) => new Set(shown.map(([, config]) => text(config[key]))).size > 1);
  const rows = (some) =>
    some.map((key) => [h("code", {}, key), ...shown.map(([, config]) => h("code", {}, text(config[key])))]);
  return h(
    "section",
    {},
    h("h2", {}, "Config"),
    shown.length > 1
      ? [
        h("h3", {}, `${plural(differing.length, "key")} with different values`),
        table(["key", ...shown.map(([name]) => name)], rows(differing)),
      ]
      : null,
    fold(
      "config",
      shown.length > 1 ? "All keys" : "All keys of this run",
      false,
      () => table(["key", ...shown.map(([name]) => name)], rows(keys)),
      view,
      plural(keys.length, "key"),
    ),
  );
}
