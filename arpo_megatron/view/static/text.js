// The text of a trajectory: one card per segment, with shaded tokens, tool calls and branching decisions.
import { h, hint } from "./dom.js";
import { mean, number, plural, signed, whole } from "./format.js";
import { advantageAt, decision, pathTo, rewardColor } from "./drawing.js";

export const SHADES = { none: "nothing", entropy: "entropy", logprob: "log-prob", gap: "log-prob gap", advantage: "advantage" };
const LONG = 6000;
const LEAST_GAP = 0.01; // nats; rounding errors are not worth a color
const unfolded = new Set();
const tabled = new Set();

/** Return the value of a token for a shade, null if it is not stored. */
function tokenValue(segment, shade, at) {
  if (shade === "entropy") return segment.entropies?.[at] ?? null;
  if (shade === "logprob") return segment.logprobs?.[at] ?? null;
  if (shade === "gap") return gapOf(segment, at);
  return null;
}

function gapOf(segment, at) {
  const ours = segment.trainer_logprobs?.[at], theirs = segment.logprobs?.[at];
  return ours === undefined || ours === null || theirs === undefined || theirs === null ? null : ours - theirs;
}

/** Return the values between which the shades of a tree run. */
function extent(tree, shade) {
  let low = 0, high = 0;
  for (const segment of tree.segments) for (let at = 0; at < segment.tokens; at += 1) {
    const value = tokenValue(segment, shade, at);
    if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  return shade === "gap" ? [Math.min(low, -LEAST_GAP), Math.max(high, LEAST_GAP)] : [low, high];
}

function shadeOf(value, shade, [low, high]) {
  if (value === null) return null;
  if (shade === "entropy") return ["var(--heat)", high ? value / high : 0];
  if (shade === "logprob") return ["var(--heat)", low ? Math.min(1, value / Math.max(low, -5)) : 0];
  const most = Math.max(-low, high);
  return [value < 0 ? "var(--low)" : "var(--high)", most ? Math.abs(value) / most : 0];
}

function tokenFacts(segment, at, advantage) {
  const logprob = segment.logprobs?.[at], gap = gapOf(segment, at);
  const facts = [["token", `${JSON.stringify(segment.pieces?.[at] ?? "")} (id ${segment.token_ids[at]}, ${at + 1} of ${segment.tokens})`]];
  if (logprob !== undefined && logprob !== null) facts.push(["log-prob", `${number(logprob, "nats")}, probability ${number(Math.exp(logprob), "%")}`]);
  if (segment.entropies?.[at] !== undefined) facts.push(["entropy", number(segment.entropies[at], "nats")]);
  if (gap !== null) facts.push(["trainer − engine", `${number(gap, "nats")}, ratio ${number(Math.exp(gap))}`]);
  if (advantage !== null) facts.push(["advantage", signed(advantage)]);
  return facts;
}

/** Return the shaded tokens of a MODEL segment, or a table of their numbers. */
function tokens(segment, index, view, advantage) {
  if (!segment.pieces) return h("pre", {}, segment.text);
  if (tabled.has(index)) return tokenTable(segment, advantage);
  const whole_ = unfolded.has(index), count = whole_ ? segment.tokens : Math.min(segment.tokens, LONG / 4);
  const spans = [];
  for (let at = 0; at < count; at += 1) {
    const shade = view.shade === "advantage" ? (advantage === null ? null : [advantage < 0 ? "var(--low)" : "var(--high)", Math.min(1, Math.abs(advantage) / 2)])
      : shadeOf(tokenValue(segment, view.shade, at), view.shade, view.extent);
    const vars = shade ? { "--c": shade[0], "--a": `${Math.round(Math.max(0, shade[1]) * 85)}%` } : null;
    spans.push(h("span", { class: shade ? "t shaded" : "t", "data-at": at, vars }, segment.pieces[at]));
  }
  const explain = (event) => {
    const at = event.target.dataset?.at;
    if (at === undefined) return hint(null);
    const box = event.target.getBoundingClientRect();
    return hint(tokenFacts(segment, Number(at), advantage), box);
  };
  return [h("pre", { class: "tokens", onpointerover: explain, onpointerleave: () => hint(null) }, spans),
    count < segment.tokens ? h("button", { onclick: () => { unfolded.add(index); view.rerender(); } }, `Show all ${whole(segment.tokens)} tokens`) : null];
}

function tokenTable(segment, advantage) {
  const cell = (value) => h("td", {}, number(value));
  return h("div", { class: "scroll log", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, ["token", "id", "log-prob (nats)", "probability", "entropy (nats)", "trainer − engine (nats)", "advantage"].map((title) => h("th", {}, title)))),
    h("tbody", {}, segment.token_ids.map((id, at) => h("tr", {}, h("td", {}, h("code", {}, JSON.stringify(segment.pieces[at]))), h("td", {}, id), cell(segment.logprobs?.[at]),
      h("td", {}, segment.logprobs ? number(Math.exp(segment.logprobs[at]), "%") : "–"), cell(segment.entropies?.[at]), cell(gapOf(segment, at)), h("td", {}, signed(advantage)))))));
}

function longText(text, index, view) {
  const all = unfolded.has(index) || text.length <= LONG;
  return [h("pre", { tabindex: text.length > 600 ? 0 : null }, all ? text : text.slice(0, LONG)),
    all ? null : h("button", { onclick: () => { unfolded.add(index); view.rerender(); } }, `Show all ${whole(text.length)} characters`)];
}

function argumentsOf(tool) {
  try {
    const given = JSON.parse(tool.arguments), names = Object.keys(given);
    if (names.length === 1 && typeof given[names[0]] === "string") return given[names[0]];
    return JSON.stringify(given, null, 2);
  } catch { return tool.arguments; }
}

function toolCard(tree, index, view) {
  const segment = tree.segments[index], tool = segment.tool;
  if (!tool) return [h("header", {}, h("b", {}, "Tool answer"), h("span", { class: "quiet" }, plural(segment.tokens, "token"))), longText(segment.text, index, view)];
  return [h("header", {}, h("b", {}, `Tool: ${tool.name}`), h("span", { class: tool.status === "ok" ? "good" : "bad" }, tool.status),
    h("span", { class: "quiet" }, tool.cached ? "answered from the cache" : number(tool.seconds, "s"), `, ${plural(segment.tokens, "token")}`, times(tree, index))),
  h("div", { class: "call" }, h("span", { class: "quiet" }, "called with"), h("pre", {}, argumentsOf(tool))),
  h("span", { class: "quiet" }, "answered"), longText(segment.text, index, view)];
}

function modelCard(tree, shape, index, place, view) {
  const segment = tree.segments[index], leaves = shape.below[index];
  const own = mean(leaves.map((leaf) => advantageAt(tree.leaves[leaf], index)));
  const entropies = segment.entropies ?? [];
  const toggle = () => { if (!tabled.delete(index)) tabled.add(index); view.rerender(); };
  return [h("header", {}, h("b", {}, "Model"),
    h("span", { class: "quiet" }, plural(segment.tokens, "token"), segment.grown === undefined ? `, policy version ${segment.policy_version}` : ", grown again", shape.counts[index] > 1 ? `, shared by ${shape.counts[index]} trajectories` : "", times(tree, index)),
    own !== null ? h("span", {}, "advantage ", signed(own)) : null,
    segment.pieces ? h("button", { class: "plain", "data-key": `numbers ${index}`, "aria-pressed": String(tabled.has(index)), onclick: toggle }, tabled.has(index) ? "text" : "numbers") : null),
  segment.branch ? branchCard(segment, entropies) : null,
  tokens(segment, index, view, own)];
}

function branchCard(segment, entropies) {
  const { branch } = segment, taken = branch.draw < branch.probability;
  return h("div", { class: "decision" }, h("span", { class: "diamond", "aria-hidden": "true" }, taken ? "◆" : "◇"),
    decision(branch).map(([name, value]) => h("span", {}, h("span", { class: "quiet" }, name), " ", value)),
    entropies.length ? h("span", {}, h("span", { class: "quiet" }, `entropy of the first ${entropies.length} tokens`), " ", number(mean(entropies), "nats")) : null);
}

/** Return when a segment was there, in seconds after the tree began: from the end of the segment above to its own. */
function times(tree, index) {
  const segment = tree.segments[index], begin = tree.segments[segment.parent]?.ended_s ?? 0;
  return typeof segment.ended_s === "number" ? `, ${begin.toFixed(2)} to ${segment.ended_s.toFixed(2)} s` : "";
}

/** Return the card of one segment on the path to the leaf at `place`. */
function card(tree, shape, index, place, view) {
  const segment = tree.segments[index], role = segment.role;
  const body = role === "prompt" ? [h("header", {}, h("b", {}, "Prompt"), h("span", { class: "quiet" }, plural(segment.tokens, "token"))), longText(segment.text, index, view)]
    : role === "tool" ? toolCard(tree, index, view) : modelCard(tree, shape, index, place, view);
  return [h("article", { class: `card ${role}${view.segment === index ? " chosen" : ""}`, "data-segment": index, vars: { "--c": role === "model" ? rewardColor(shape, shape.rewards[index]) : "var(--line)" } }, body),
    shape.children[index].length > 1 ? forkCard(tree, shape, index, place, view) : null,
    role !== "model" && segment.grown === undefined && view.growing ? growCard(index, view.growing) : null];
}

/** Return the control that samples continuations at the end of a segment. */
function growCard(index, growing) {
  const { state } = growing, busy = Boolean(state.busy), here = state.segment === index;
  const count = h("input", { type: "number", min: 1, max: 16, value: state.count ?? 4, "aria-label": "number of continuations", "data-key": `grow count ${index}` });
  return h("div", { class: "forkcard" }, h("span", {}, "grow again from here:"), count,
    h("button", { "data-key": `grow ${index}`, disabled: busy, onclick: () => growing.start(index, Math.max(1, Math.min(16, Math.round(Number(count.value)) || 1))) }, busy && here ? "sampling …" : "sample continuations"),
    here && state.error ? h("span", { class: "bad", role: "alert" }, state.error) : null);
}

function forkCard(tree, shape, index, place, view) {
  const children = shape.children[index];
  const buttons = children.map((child, number_) => {
    const leaves = shape.below[child], here = leaves.includes(place);
    const text = `${tree.segments[child].grown === undefined ? "branch" : "grown branch"} ${number_ + 1}: ${shape.counts[child] === 1 ? "1 trajectory" : `${shape.counts[child]} trajectories`}, mean reward ${signed(shape.rewards[child])}`;
    if (here) return h("span", { class: "branch here", vars: { "--c": rewardColor(shape, shape.rewards[child]) } }, `${text} (this one)`);
    return h("span", { class: "branch", vars: { "--c": rewardColor(shape, shape.rewards[child]) } }, h("button", { class: "plain", "data-key": `branch ${child}`, onclick: () => view.choose(child, leaves[0]) }, text),
      h("button", { "data-key": `compare ${child}`, "aria-pressed": String(leaves.includes(view.vs)), onclick: () => view.compare(leaves.includes(view.vs) ? null : leaves[0]) }, leaves.includes(view.vs) ? "close" : "side by side"));
  });
  const count = children.filter((child) => tree.segments[child].grown === undefined).length, grown = children.length - count;
  const title = tree.segments[index].role === "prompt" ? count === 1 ? "1 trajectory begins here" : `${count} trajectories begin here` : count > 1 ? `Fork into ${count} branches` : "No fork";
  return h("div", { class: "forkcard" }, h("b", {}, title, grown ? `, ${grown} grown again` : ""), buttons);
}

function scores(tree, shape, place) {
  const leaf = tree.leaves[place], path = pathTo(tree, leaf.segment).map((i) => tree.segments[i]);
  const facts = [["reward", signed(leaf.reward)], ["accuracy", number(leaf.accuracy)], ["advantage", signed(advantageAt(leaf, leaf.segment))],
    ["answer read", leaf.answer ?? "none"], ["format", leaf.format_ok === null ? "–" : leaf.format_ok ? "kept" : leaf.format_fault || "broken"],
    ...Object.entries(leaf.terms).filter(([, value]) => value !== null).map(([name, value]) => [`part: ${name}`, number(value)]),
    ["tool calls", whole(path.filter((segment) => segment.role === "tool").length)], ["tokens", whole(path.reduce((sum, segment) => sum + segment.tokens, 0))]];
  return h("dl", { class: "scores", vars: { "--c": rewardColor(shape, leaf.reward) } }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Return the text of the chosen trajectory, next to another one from their fork on if `view.vs` names one. */
export function trajectoryText(tree, shape, view) {
  view.extent = extent(tree, view.shade);
  const column = (place, path) => h("div", { class: "column" }, h("h3", {}, `Trajectory ${place + 1}`), scores(tree, shape, place), path.map((index) => card(tree, shape, index, place, view)));
  const own = pathTo(tree, tree.leaves[view.leaf].segment);
  if (view.vs === null || view.vs === view.leaf) return h("div", {}, column(view.leaf, own));
  const other = pathTo(tree, tree.leaves[view.vs].segment);
  let common = 0;
  while (common < own.length && own[common] === other[common]) common += 1;
  return h("div", {}, h("details", {}, h("summary", {}, "The part that both share", h("span", { class: "quiet" }, ` ${plural(common, "segment")}`)), own.slice(0, common).map((index) => card(tree, shape, index, view.leaf, { ...view, vs: null }))),
    forkCard(tree, shape, own[common - 1], view.leaf, view),
    h("div", { class: "columns" }, column(view.leaf, own.slice(common)), column(view.vs, other.slice(common))));
}

/** Forget which texts were opened: another tree is shown. */
export function foldTexts() {
  unfolded.clear();
  tabled.clear();
}
