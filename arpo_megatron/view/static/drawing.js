// The tree as a drawing: one row per trajectory, segments as bars whose length is their tokens.
import { h, hint, s } from "./dom.js";
import { mean, number, plural, signed, whole } from "./format.js";

const ROW = 26, LEFT = 6, PROMPT = 40, GAP = 9;

/** Return what the pictures need of a tree: children, rows, and the leaves below each segment with their mean. */
export function shapeOf(tree) {
  const count = tree.segments.length, children = tree.segments.map(() => []);
  tree.segments.forEach((segment, i) => {
    if (i) children[segment.parent].push(i);
  });
  const leafAt = new Map(tree.leaves.map((leaf, place) => [leaf.segment, place]));
  const below = tree.segments.map(() => []), order = [], pending = [0];
  while (pending.length) {
    const i = pending.pop();
    order.push(i);
    pending.push(...children[i].slice().reverse());
  }
  for (const i of order.slice().reverse()) {
    below[i] = leafAt.has(i) && !children[i].length ? [leafAt.get(i)] : children[i].flatMap((child) => below[child]);
  }
  const rows = order.filter((i) => !children[i].length && leafAt.has(i)).map((i) => leafAt.get(i));
  const stored = (i) =>
    below[i].filter((place) => tree.leaves[place].grown === undefined || tree.segments[i].grown !== undefined);
  const counts = below.map((_, i) => stored(i).length);
  const rewards = below.map((_, i) => mean(stored(i).map((place) => tree.leaves[place].reward)));
  const all = tree.leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null);
  const low = Math.min(0, ...all), high = Math.max(...all, low + 1e-9, 0);
  return {
    count,
    children,
    below,
    counts,
    order,
    rows,
    rewards,
    low,
    high,
    rowOf: new Map(rows.map((place, row) => [place, row])),
  };
}

/** Return the segments from the prompt to a segment. */
export function pathTo(tree, segment) {
  const path = [];
  for (let i = segment; i >= 0; i = tree.segments[i].parent) path.push(i);
  return path.reverse();
}

/** Return a colour between "low reward" and "high reward"; grey without a reward. */
export function rewardColor(shape, reward) {
  if (reward === null || reward === undefined) return "var(--line)";
  const share = (reward - shape.low) / (shape.high - shape.low);
  return `color-mix(in oklab, var(--high) ${Math.round(100 * share)}%, var(--low))`;
}

/** Return the advantage that counts at a segment for a leaf: that of the leaf, or its own value there. */
export function advantageAt(leaf, segment) {
  return leaf.advantages.length > 1 ? leaf.advantages[segment] : leaf.advantages[0] ?? null;
}

export function forked(shape, tree, i) {
  return i > 0 && tree.segments[i].role !== "model" && shape.children[i].length > 1;
}

function describe(tree, shape, i) {
  const segment = tree.segments[i],
    lines = [[`segment ${i}`, { prompt: "prompt", model: "model", tool: "tool answer" }[segment.role]], [
      "tokens",
      whole(segment.tokens),
    ]];
  if (segment.tool) {
    lines.push([
      "tool",
      `${segment.tool.name}, ${segment.tool.status}, ${
        segment.tool.cached ? "from the cache" : number(segment.tool.seconds, "s")
      }`,
    ]);
  }
  if (segment.branch) lines.push(...decision(segment.branch));
  lines.push(["below", plural(shape.counts[i], "trajectory")]);
  if (shape.rewards[i] !== null) lines.push(["mean reward", signed(shape.rewards[i])]);
  return lines;
}

/** Return the branching decision at the start of a segment as lines of name and value. */
export function decision(branch) {
  return [["entropy change dH", signed(branch.dH)], ["chance of a fork", number(branch.probability, "%")], [
    "draw",
    `${branch.draw.toFixed(2)} ${branch.draw < branch.probability ? "<" : "≥"} ${branch.probability.toFixed(2)}`,
  ], ["rule", branch.why]];
}

/** Return the picture. view: {leaf, vs, segment, flat, width, choose(segment, leaf)}. */
export function drawing(tree, shape, view) {
  const narrow = view.width < 640, gutter = narrow ? 124 : 214;
  const width = Math.max(view.width, 330), region = width - gutter - LEFT;
  const sizes = tree.segments.map((segment, i) => (i ? segment.tokens : 0));
  const ends = new Map(), total = sizes.slice();
  tree.segments.forEach((segment, i) => {
    if (i) total[i] += total[segment.parent];
  });
  const deepest = Math.max(1, ...tree.leaves.map((leaf) => pathTo(tree, leaf.segment).length));
  const scale = (region - PROMPT - GAP * deepest) / Math.max(1, ...total);
  tree.segments.forEach((segment, i) => {
    ends.set(i, i ? ends.get(segment.parent) + GAP + Math.max(2, sizes[i] * scale) : LEFT + PROMPT);
  });
  const farthest = Math.max(...ends.values());
  const squeeze = farthest > LEFT + region ? region / (farthest - LEFT) : 1;
  const x = (value) => LEFT + (value - LEFT) * squeeze;
  const middle = (row) => 14 + row * ROW;
  const places = shape.below.map((leaves) => leaves.map((place) => shape.rowOf.get(place)));
  const y = places.map((rows) => (rows.length ? middle((Math.min(...rows) + Math.max(...rows)) / 2) : 14));
  const onPath = new Set(view.leaf === null ? [] : pathTo(tree, tree.leaves[view.leaf].segment));
  const height = 14 + Math.max(1, shape.rows.length) * ROW;
  const thick = (i) => 3 + (13 * shape.counts[i]) / Math.max(1, shape.counts[0]);

  const bar = (i, at, copy, leaf) => {
    const segment = tree.segments[i],
      start = i ? ends.get(segment.parent) + GAP : LEFT,
      size = copy === null ? Math.max(6, thick(i)) : 10;
    const faults = segment.tool && segment.tool.status !== "ok";
    const css = [
      "segment",
      segment.role,
      segment.grown === undefined ? "" : "grown",
      copy ? "copy" : "",
      faults ? "fault" : "",
      onPath.has(i) ? "on" : "",
      view.segment === i ? "chosen" : "",
    ].join(" ");
    const pick = () => view.choose(i, leaf);
    return s(
      "g",
      {
        class: css,
        tabindex: copy ? null : 0,
        role: "button",
        "data-key": copy ? null : `segment ${i}`,
        "aria-label": describe(tree, shape, i).map((line) => line.join(" ")).join(", "),
        onclick: pick,
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            pick();
          }
        },
        onpointermove: (event) =>
          hint(describe(tree, shape, i), {
            left: event.clientX + 12,
            top: event.clientY - 4,
            bottom: event.clientY + 8,
          }),
        onpointerleave: () => hint(null),
      },
      s("rect", { class: "catch", x: x(start), y: at - 11, width: Math.max(8, x(ends.get(i)) - x(start)), height: 22 }),
      s("rect", {
        class: "body",
        x: x(start),
        y: at - size / 2,
        width: x(ends.get(i)) - x(start),
        height: size,
        rx: Math.min(3, size / 2),
        vars: { "--c": segment.role === "model" ? rewardColor(shape, shape.rewards[i]) : "var(--line)" },
      }),
      faults ? s("text", { class: "flag", x: x(start) + 2, y: at - size / 2 - 2 }, "!") : null,
      segment.branch && !copy ? fork(tree, shape, i, x(start), at) : null,
    );
  };
  const link = (i, from, to, copy) => {
    const a = x(ends.get(tree.segments[i].parent)), b = x(ends.get(tree.segments[i].parent) + GAP), half = (a + b) / 2;
    return s("path", {
      class: `link${onPath.has(i) ? " on" : ""}${copy ? " copy" : ""}`,
      d: `M${a} ${from}C${half} ${from} ${half} ${to} ${b} ${to}`,
      vars: {
        "--w": `${copy === null ? Math.max(1.5, thick(i) * 0.7) : 2}px`,
        "--c": rewardColor(shape, shape.rewards[i]),
      },
    });
  };
  const seen = new Set(), links = [], bars = [];
  if (view.flat) {
    shape.rows.forEach((place, row) => {
      for (const i of pathTo(tree, tree.leaves[place].segment)) {
        const at = middle(row);
        if (i) links.push(link(i, at, at, seen.has(i)));
        bars.push(bar(i, at, seen.has(i), place));
        seen.add(i);
      }
    });
  } else {for (const i of shape.order) {
      if (i) links.push(link(i, y[tree.segments[i].parent], y[i], null));
      bars.push(bar(i, y[i], null, null));
    }}
  const labels = shape.rows.map((place, row) =>
    leafLabel(tree, shape, place, middle(row), width - gutter + 8, { ...view, narrow, gutter })
  );
  return s(
    "svg",
    {
      class: "tree",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "group",
      "aria-label": `Tree of ${plural(shape.rows.length, "trajectory")}`,
    },
    s(
      "defs",
      {},
      s(
        "pattern",
        { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("rect", { width: 6, height: 6, class: "hatch0" }),
        s("rect", { width: 2, height: 6, class: "hatch1" }),
      ),
    ),
    links,
    bars,
    labels,
  );
}

function fork(tree, shape, i, at, y) {
  const taken =
    shape.children[tree.segments[i].parent].filter((child) => tree.segments[child].grown === undefined).length > 1;
  return s("path", { class: `fork ${taken ? "taken" : ""}`, d: `M${at - 5} ${y}l4 -5l4 5l-4 5z` });
}

function leafLabel(tree, shape, place, y, x, view) {
  const leaf = tree.leaves[place],
    advantage = advantageAt(leaf, leaf.segment),
    finish = tree.segments[leaf.segment].finish;
  const pick = () => view.choose(leaf.segment, place);
  const end = {
    end: "",
    length: "too long",
    call_limit: "call limit",
    malformed: "malformed call",
    tool_call: "unfinished",
  }[finish] ?? "unfinished";
  return s(
    "g",
    {
      class: `leaf${leaf.grown === undefined ? "" : " grown"}${view.leaf === place ? " on" : ""}${
        view.vs === place ? " vs" : ""
      }`,
      tabindex: 0,
      role: "button",
      "data-key": `leaf ${place}`,
      "aria-label": `trajectory ${place + 1}, reward ${signed(leaf.reward)}`,
      onclick: pick,
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault(); // the space bar would scroll
        pick();
      },
    },
    s("rect", { class: "catch", x: x - 4, y: y - 12, width: view.gutter - 8, height: 24, rx: 4 }),
    s("circle", { cx: x + 5, cy: y, r: 5, class: "body", vars: { "--c": rewardColor(shape, leaf.reward) } }),
    s("text", { x: x + 16, y: y + 4, class: "reward" }, signed(leaf.reward)),
    s("text", { x: x + 62, y: y + 4, class: "quiet" }, `A ${signed(advantage)}`),
    view.narrow ? null : s(
      "text",
      { x: x + 122, y: y + 4, class: "quiet" },
      leaf.grown !== undefined ? `grown${end ? `, ${end}` : ""}` : leaf.replayed ? "replayed" : end,
    ),
  );
}

/** Return the note on tokens below the picture. */
export function savings(tree) {
  const saved = tree.flat_tokens ? 1 - tree.unique_tokens / tree.flat_tokens : 0;
  return h(
    "p",
    { class: "quiet" },
    `The tree has ${whole(tree.unique_tokens)} tokens; flattened into separate trajectories it has ${
      whole(tree.flat_tokens)
    }. Sharing saves ${number(saved, "%")}.`,
  );
}
