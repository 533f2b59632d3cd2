// The tree page: the list of a step's trees with filters, and one tree with its texts.
import { h } from "./dom.js";
import { duration, mean, number, plural, signed, stepName, whole } from "./format.js";
import { drawing, rewardColor, savings, shapeOf } from "./drawing.js";
import { trajectoryText } from "./text.js";
import { foldTexts, SHADES } from "./tokens.js";

const FILTERS = {
  all: ["all", () => true],
  mixed: ["mixed rewards", (row) => new Set(row.rewards).size > 1],
  forks: ["with forks", (row) => row.forks > 0],
  errors: ["with tool errors", (row) => row.tool_errors > 0],
  cut: ["cut by a limit", (row) => row.finish.length || row.finish.call_limit || row.finish.malformed],
  dropped: ["not trained", (row) => row.dropped !== null],
};
const SORTS = {
  stored: ["as stored", (row) => row.number],
  low: ["low reward first", (row) => mean(row.rewards) ?? Infinity],
  high: ["high reward first", (row) => -(mean(row.rewards) ?? -Infinity)],
  forks: ["most forks first", (row) => -row.forks],
  long: ["longest first", (row) => -row.unique_tokens],
  slow: ["slowest first", (row) => -row.seconds],
};
const MORE = 300;

/** Return the summaries; a damaged tree has none. */
function wholeTrees(rows) {
  return rows.filter((row) => row.damaged === undefined);
}

/** Return the rows that the filter lets through, in the chosen order. */
export function chosenRows(rows, query) {
  const keep = (FILTERS[query.filter] ?? FILTERS.all)[1], value = (SORTS[query.sort] ?? SORTS.stored)[1];
  const words = (query.find ?? "").toLowerCase();
  return wholeTrees(rows).filter((row) => keep(row) && row.task.toLowerCase().includes(words)).sort((a, b) =>
    value(a) - value(b) || a.number - b.number
  );
}

function select(label, key, options, value, change) {
  return h(
    "label",
    {},
    h("span", { class: "quiet" }, label),
    h(
      "select",
      { "data-key": `select ${key}`, onchange: (event) => change(event.target.value) },
      options.map(([name, text]) => h("option", { value: name, selected: name === value }, text)),
    ),
  );
}

function strip(rewards) {
  const low = Math.min(0, ...rewards), high = Math.max(...rewards, 0, low + 1e-9);
  return h(
    "span",
    { class: "strip", "aria-hidden": "true" },
    rewards.slice(0, 24).map((reward) => h("i", { vars: { "--c": rewardColor({ low, high }, reward) } })),
  );
}

/** view: {page, rows, query, link(changes), stepText(step)}. */
function list(view) {
  const { page, query } = view, rows = chosenRows(view.rows, query), known = wholeTrees(view.rows);
  const steps = [
    ...page.tree_steps.map(String),
    ...page.held_out_tree_steps.map((step) => `held-out-${step}`),
  ].map((step) => [step, stepName(step)]);
  return h(
    "aside",
    { class: "list" },
    h(
      "div",
      { class: "filters" },
      select(
        "step",
        "step",
        steps,
        query.step,
        (step) => view.link({ step, tree: null, leaf: null, segment: null, vs: null }),
      ),
      select(
        "show",
        "filter",
        Object.entries(FILTERS).map((
          [key, [text]],
        ) => [key, `${text} (${whole(known.filter(FILTERS[key][1]).length)})`]),
        query.filter ?? "all",
        (filter) => view.link({ filter }),
      ),
      select(
        "order",
        "sort",
        Object.entries(SORTS).map(([key, [text]]) => [key, text]),
        query.sort ?? "stored",
        (sort) => view.link({ sort }),
      ),
      h(
        "label",
        {},
        h("span", { class: "quiet" }, "task"),
        h("input", {
          type: "search",
          "data-key": "find",
          value: query.find ?? "",
          placeholder: "part of its id",
          onchange: (event) => view.link({ find: event.target.value || null }),
        }),
      ),
    ),
    rows.length
      ? h("ol", { "data-scroll": "list" }, rows.slice(0, MORE).map((row) => item(view, row)))
      : view.rows.length
      ? h("p", { class: "quiet" }, "No tree of this step matches.")
      : null,
    view.rows.filter((row) => row.damaged).map((row) =>
      h("p", { class: "problem" }, `Tree ${row.number} is damaged: ${row.damaged}.`)
    ),
    rows.length > MORE ? h("p", { class: "quiet" }, `${whole(rows.length - MORE)} more; filter to see them.`) : null,
  );
}

function item(view, row) {
  return h(
    "li",
    {},
    h(
      "a",
      {
        href: view.href({ tree: row.number, leaf: null, segment: null, vs: null }),
        "data-key": `tree ${row.number}`,
        "aria-current": row.number === view.query.tree ? "true" : null,
      },
      h("span", { class: "name" }, row.task),
      strip(row.rewards),
      h(
        "span",
        { class: "quiet" },
        row.rewards.length ? `mean ${signed(mean(row.rewards))}` : "no rewards",
        `, ${plural(row.forks, "fork")}`,
        row.tool_errors ? `, ${plural(row.tool_errors, "tool error")}` : "",
        row.dropped ? `, not trained: ${row.dropped.replace("_", " ")}` : "",
      ),
    ),
  );
}

/** Return the content of the tree page. view: that of `list`, and tree, fault (why there is none), tasks, width, ... */
export function treePage(view) {
  return h(
    "div",
    { class: "trees" },
    list(view),
    view.tree ? oneTree(view) : h("section", {}, absence(view.fault)),
  );
}

function absence(fault) {
  return fault
    ? h("p", { class: "problem", role: "alert" }, fault)
    : h("p", { class: "quiet" }, "Choose a tree from the list.");
}

function oneTree(view) {
  const { tree, query } = view, shape = shapeOf(tree);
  if (view.fresh) foldTexts();
  const leaf = tree.leaves[query.leaf] ? query.leaf : bestLeaf(tree, shape),
    vs = tree.leaves[query.vs] ? query.vs : null;
  const choose = (segment, wanted) => {
    const leaves = shape.below[segment];
    view.link({ segment, leaf: wanted ?? (leaves.includes(leaf) ? leaf : leaves[0] ?? leaf) }, { to: segment });
  };
  const state = {
    leaf,
    vs,
    segment: query.segment,
    flat: query.flat === 1,
    width: view.width,
    shade: query.shade ?? "entropy",
    choose,
    compare: (place) => view.link({ vs: place }),
    growing: view.growing,
    rerender: view.rerender,
  };
  const stored = tree.leaves.filter((one) => one.grown === undefined),
    known = stored.map((one) => one.reward).filter((reward) => reward !== null);
  const facts = [
    ["trajectories", whole(stored.length)],
    ["mean reward", signed(mean(known))],
    ["forks after tool answers", whole(tree.forks)],
    ["grown in", duration(tree.seconds)],
    ["policy versions", versions(tree)],
    tree.replayed ? ["replayed", whole(tree.replayed)] : null,
    tree.dropped ? ["not trained", tree.dropped.replace("_", " ")] : null,
  ].filter(Boolean);
  return h(
    "section",
    { class: "tree-section" },
    h("h1", {}, tree.task, " ", tree.dropped ? h("span", { class: "pill stopped" }, "not trained") : null),
    h("p", { class: "question" }, tree.prompt),
    h(
      "p",
      { class: "facts" },
      h("span", {}, h("span", { class: "quiet" }, "right answer"), " ", h("b", {}, tree.truth)),
      facts.map(([name, value]) => h("span", {}, h("span", { class: "quiet" }, name), " ", value)),
    ),
    others(view),
    h(
      "div",
      { class: "bar" },
      h(
        "div",
        { class: "choices", role: "group", "aria-label": "Form of the drawing" },
        [[null, "tree"], [1, "flattened"]].map(([flat, text]) =>
          h("button", {
            "data-key": `flat ${flat}`,
            "aria-pressed": String((query.flat ?? null) === flat),
            onclick: () => view.link({ flat }),
          }, text)
        ),
      ),
      h(
        "div",
        { class: "legend" },
        h(
          "span",
          { class: "scale" },
          h("span", { class: "quiet" }, signed(shape.low)),
          h("i", {}),
          h("span", { class: "quiet" }, `${signed(shape.high)} reward`),
        ),
        h(
          "span",
          { class: "quiet" },
          "length: tokens · thickness: trajectories below · hatched: tool · ◆ fork · ◇ no fork · A: advantage",
          tree.growths ? " · dashed: grown again" : "",
        ),
      ),
    ),
    h("div", { class: "scroll picture", "data-scroll": "picture" }, drawing(tree, shape, state)),
    savings(tree),
    growths(tree, shape),
    h(
      "div",
      { class: "bar" },
      h("h2", {}, "Text"),
      select("shade tokens by", "shade", Object.entries(SHADES), state.shade, (shade) => view.link({ shade })),
      h(
        "span",
        { class: "quiet" },
        tree.segments.some((segment) => segment.pieces)
          ? "hover over a token for its numbers, or press “numbers”"
          : "the tokenizer of the run cannot be read here, so tokens are not shown one by one",
      ),
    ),
    trajectoryText(tree, shape, state),
  );
}

/** Return what was grown: by which weights, and the rewards next to those of the stored trajectories below the node. */
function growths(tree, shape) {
  return (tree.growths ?? []).map((one, i) => {
    const own = tree.leaves.filter((leaf) => leaf.grown === i).map((leaf) => leaf.reward),
      before = shape.rewards[one.segment];
    return h(
      "p",
      { class: "growth" },
      h("b", {}, `Grown again after segment ${one.segment}: ${plural(one.count, "continuation")}`),
      ` by ${one.weights}, temperature ${number(one.temperature)}. `,
      own.some((reward) => reward !== null)
        ? `Mean reward ${signed(mean(own))}; of the stored trajectories below, ${signed(before)}. `
        : "",
      one.note ? `${one.note}.` : "",
    );
  });
}

function bestLeaf(tree, shape) {
  return shape.rows.reduce(
    (
      best,
      place,
    ) => ((tree.leaves[place].reward ?? -Infinity) > (tree.leaves[best].reward ?? -Infinity) ? place : best),
    shape.rows[0] ?? 0,
  );
}

function versions(tree) {
  const found = [
    ...new Set(tree.segments.filter((segment) => segment.role === "model").map((segment) => segment.policy_version)),
  ].sort((a, b) => a - b);
  return found.length > 1 ? `${found[0]} to ${found[found.length - 1]}` : String(found[0] ?? "–");
}

/** Return at most 30 of the trees, those of the steps nearest to `step`, in the order of their steps. */
export function nearest(found, step) {
  const at = (text) => Number(text.replace("held-out-", "")), here = at(step);
  const away = (one) => Math.abs(at(one.step) - here);
  return found.slice().sort((a, b) => away(a) - away(b)).slice(0, 30).sort((a, b) => at(a.step) - at(b.step));
}

function others(view) {
  const found = (view.tasks ?? []).filter((one) => one.step !== view.query.step || one.tree !== view.query.tree);
  if (!found.length) return null;
  const near = nearest(found, view.query.step);
  return h(
    "p",
    { class: "facts" },
    h("span", { class: "quiet" }, "the same task in other steps"),
    near.map((one) =>
      h(
        "a",
        { href: view.href({ step: one.step, tree: one.tree, leaf: null, segment: null, vs: null }) },
        one.step.replace(/^(held-out-)?/, (found) => (found ? "after step " : "step ")),
        ` (mean ${signed(one.reward)})`,
      )
    ),
    found.length > near.length ? h("span", { class: "quiet" }, `${whole(found.length - near.length)} more`) : null,
  );
}
