// The text of a trajectory: one card per segment, with shaded tokens, tool calls and branching decisions.
import { h } from "./dom.js";
import { mean, number, plural, signed, whole } from "./format.js";
import { advantageAt, decision, pathTo, rewardColor } from "./drawing.js";
import { extent, LONG, tabled, tokens, unfolded } from "./tokens.js";

function longText(text, index, view) {
  const all = unfolded.has(index) || text.length <= LONG;
  return [
    h("pre", { tabindex: text.length > 600 ? 0 : null }, all ? text : text.slice(0, LONG)),
    all ? null : h("button", {
      onclick: () => {
        unfolded.add(index);
        view.rerender();
      },
    }, `Show all ${whole(text.length)} characters`),
  ];
}

function argumentsOf(tool) {
  try {
    const given = JSON.parse(tool.arguments), names = Object.keys(given);
    if (names.length === 1 && typeof given[names[0]] === "string") return given[names[0]];
    return JSON.stringify(given, null, 2);
  } catch {
    return tool.arguments;
  }
}

function toolCard(tree, index, view) {
  const segment = tree.segments[index], tool = segment.tool;
  if (!tool) {
    return [
      h("header", {}, h("b", {}, "Tool answer"), h("span", { class: "quiet" }, plural(segment.tokens, "token"))),
      longText(segment.text, index, view),
    ];
  }
  return [
    h(
      "header",
      {},
      h("b", {}, `Tool: ${tool.name}`),
      h("span", { class: tool.status === "ok" ? "good" : "bad" }, tool.status),
      h(
        "span",
        { class: "quiet" },
        tool.cached ? "answered from the cache" : number(tool.seconds, "s"),
        `, ${plural(segment.tokens, "token")}`,
        times(tree, index),
      ),
    ),
    h("div", { class: "call" }, h("span", { class: "quiet" }, "called with"), h("pre", {}, argumentsOf(tool))),
    h("span", { class: "quiet" }, "answered"),
    longText(segment.text, index, view),
  ];
}

function modelCard(tree, shape, index, view) {
  const segment = tree.segments[index], leaves = shape.below[index];
  const own = mean(leaves.map((leaf) => advantageAt(tree.leaves[leaf], index)));
  const entropies = segment.entropies ?? [];
  const toggle = () => {
    if (!tabled.delete(index)) tabled.add(index);
    view.rerender();
  };
  return [
    h(
      "header",
      {},
      h("b", {}, "Model"),
      h(
        "span",
        { class: "quiet" },
        plural(segment.tokens, "token"),
        segment.grown === undefined ? `, policy version ${segment.policy_version}` : ", grown again",
        shape.counts[index] > 1 ? `, shared by ${shape.counts[index]} trajectories` : "",
        times(tree, index),
      ),
      own !== null ? h("span", {}, "advantage ", signed(own)) : null,
      segment.pieces
        ? h("button", {
          class: "plain",
          "data-key": `numbers ${index}`,
          "aria-pressed": String(tabled.has(index)),
          onclick: toggle,
        }, tabled.has(index) ? "text" : "numbers")
        : null,
    ),
    segment.branch ? branchCard(segment, entropies) : null,
    tokens(segment, index, view, own),
  ];
}

function branchCard(segment, entropies) {
  const { branch } = segment, taken = branch.draw < branch.probability;
  return h(
    "div",
    { class: "decision" },
    h("span", { class: "diamond", "aria-hidden": "true" }, taken ? "◆" : "◇"),
    decision(branch).map(([name, value]) => h("span", {}, h("span", { class: "quiet" }, name), " ", value)),
    entropies.length
      ? h(
        "span",
        {},
        h("span", { class: "quiet" }, `entropy of the first ${entropies.length} tokens`),
        " ",
        number(mean(entropies), "nats"),
      )
      : null,
  );
}

/** Return when a segment was there, in seconds after the tree began: from the end of the segment above to its own. */
function times(tree, index) {
  const segment = tree.segments[index], begin = tree.segments[segment.parent]?.ended_s ?? 0;
  return typeof segment.ended_s === "number" ? `, ${begin.toFixed(2)} to ${segment.ended_s.toFixed(2)} s` : "";
}

/** Return the card of one segment on the path to the leaf at `place`. */
function card(tree, shape, index, place, view) {
  const segment = tree.segments[index], role = segment.role;
  const body = role === "prompt"
    ? [
      h("header", {}, h("b", {}, "Prompt"), h("span", { class: "quiet" }, plural(segment.tokens, "token"))),
      longText(segment.text, index, view),
    ]
    : role === "tool"
    ? toolCard(tree, index, view)
    : modelCard(tree, shape, index, view);
  return [
    h("article", {
      class: `card ${role}${view.segment === index ? " chosen" : ""}`,
      "data-segment": index,
      vars: { "--c": role === "model" ? rewardColor(shape, shape.rewards[index]) : "var(--line)" },
    }, body),
    shape.children[index].length > 1 ? forkCard(tree, shape, index, place, view) : null,
    role !== "model" && segment.grown === undefined && view.growing ? growCard(index, view.growing) : null,
  ];
}

/** Return the control that samples continuations at the end of a segment. */
function growCard(index, growing) {
  const { state } = growing, busy = Boolean(state.busy), here = state.segment === index;
  const count = h("input", {
    type: "number",
    min: 1,
    max: 16,
    value: state.count ?? 4,
    "aria-label": "number of continuations",
    "data-key": `grow count ${index}`,
  });
  return h(
    "div",
    { class: "forkcard" },
    h("span", {}, "grow again from here:"),
    count,
    h("button", {
      "data-key": `grow ${index}`,
      disabled: busy,
      onclick: () => growing.start(index, Math.max(1, Math.min(16, Math.round(Number(count.value)) || 1))),
    }, busy && here ? "sampling …" : "sample continuations"),
    here && state.error ? h("span", { class: "bad", role: "alert" }, state.error) : null,
  );
}

function forkCard(tree, shape, index, place, view) {
  const children = shape.children[index];
  const buttons = children.map((child, number_) => {
    const leaves = shape.below[child], here = leaves.includes(place);
    const text = `${tree.segments[child].grown === undefined ? "branch" : "grown branch"} ${number_ + 1}: ${
      plural(shape.counts[child], "trajectory")
    }, mean reward ${signed(shape.rewards[child])}`;
    if (here) {
      return h(
        "span",
        { class: "branch here", vars: { "--c": rewardColor(shape, shape.rewards[child]) } },
        `${text} (this one)`,
      );
    }
    return h(
      "span",
      { class: "branch", vars: { "--c": rewardColor(shape, shape.rewards[child]) } },
      h(
        "button",
        { class: "plain", "data-key": `branch ${child}`, onclick: () => view.choose(child, leaves[0]) },
        text,
      ),
      h("button", {
        "data-key": `compare ${child}`,
        "aria-pressed": String(leaves.includes(view.vs)),
        onclick: () => view.compare(leaves.includes(view.vs) ? null : leaves[0]),
      }, leaves.includes(view.vs) ? "close" : "side by side"),
    );
  });
  const count = children.filter((child) => tree.segments[child].grown === undefined).length,
    grown = children.length - count;
  const title = tree.segments[index].role === "prompt"
    ? `${plural(count, "trajectory")} ${count === 1 ? "begins" : "begin"} here`
    : count > 1
    ? `Fork into ${count} branches`
    : "No fork";
  return h("div", { class: "forkcard" }, h("b", {}, title, grown ? `, ${grown} grown again` : ""), buttons);
}

/** Return name and text of a part of the reward; `judged` is the verdict of the judge (rewards/arpo.py). */
function part([name, value]) {
  return name === "judged" ? ["judge", value > 0.5 ? "right" : "wrong"] : [`part: ${name}`, number(value)];
}

function scores(tree, shape, place) {
  const leaf = tree.leaves[place], path = pathTo(tree, leaf.segment).map((i) => tree.segments[i]);
  const facts = [
    ["reward", signed(leaf.reward)],
    ["accuracy", number(leaf.accuracy)],
    ["advantage", signed(advantageAt(leaf, leaf.segment))],
    ["answer read", leaf.answer ?? "none"],
    ["format", leaf.format_ok === null ? "–" : leaf.format_ok ? "kept" : leaf.format_fault || "broken"],
    ...Object.entries(leaf.terms).filter(([, value]) => value !== null).map(part),
    ["tool calls", whole(path.filter((segment) => segment.role === "tool").length)],
    ["tokens", whole(path.reduce((sum, segment) => sum + segment.tokens, 0))],
  ];
  return h(
    "dl",
    { class: "scores", vars: { "--c": rewardColor(shape, leaf.reward) } },
    facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** Return the text of the chosen trajectory, next to another one from their fork on if `view.vs` names one. */
export function trajectoryText(tree, shape, view) {
  view.extent = extent(tree, view.shade);
  const column = (place, path) =>
    h(
      "div",
      { class: "column" },
      h("h3", {}, `Trajectory ${place + 1}`),
      scores(tree, shape, place),
      path.map((index) => card(tree, shape, index, place, view)),
    );
  const own = pathTo(tree, tree.leaves[view.leaf].segment);
  if (view.vs === null || view.vs === view.leaf) return h("div", {}, column(view.leaf, own));
  const other = pathTo(tree, tree.leaves[view.vs].segment);
  let common = 0;
  while (common < own.length && own[common] === other[common]) common += 1;
  return h(
    "div",
    {},
    h(
      "details",
      {},
      h("summary", {}, "The part that both share", h("span", { class: "quiet" }, ` ${plural(common, "segment")}`)),
      own.slice(0, common).map((index) => card(tree, shape, index, view.leaf, { ...view, vs: null })),
    ),
    forkCard(tree, shape, own[common - 1], view.leaf, view),
    h("div", { class: "columns" }, column(view.leaf, own.slice(common)), column(view.vs, other.slice(common))),
  );
}
