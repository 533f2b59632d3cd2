// The tokens of a MODEL segment: shaded by a number of theirs, explained under the pointer, or as a table.
import { h, hint } from "./dom.js";
import { number, signed, whole } from "./format.js";

export const SHADES = {
  none: "nothing",
  entropy: "entropy",
  logprob: "log-prob",
  gap: "log-prob gap (log of the ratio)",
  advantage: "advantage",
};
export const LONG = 6000; // characters of a text that are shown at first
const LEAST_GAP = 0.01; // nats; rounding errors are not worth a color
/** Numbers of the segments of which all is shown, and of those whose tokens are shown as a table. */
export const unfolded = new Set();
export const tabled = new Set();

/** Return the shade after this one in the list; the first after the last. */
export function nextShade(shade) {
  const names = Object.keys(SHADES);
  return names[(names.indexOf(shade) + 1) % names.length];
}

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
export function extent(tree, shade) {
  let low = 0, high = 0;
  for (const segment of tree.segments) {
    for (let at = 0; at < segment.tokens; at += 1) {
      const value = tokenValue(segment, shade, at);
      if (value !== null) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
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
  const facts = [[
    "token",
    `${JSON.stringify(segment.pieces?.[at] ?? "")} (id ${segment.token_ids[at]}, ${at + 1} of ${segment.tokens})`,
  ]];
  if (logprob !== undefined && logprob !== null) {
    facts.push(["log-prob", `${number(logprob, "nats")}, probability ${number(Math.exp(logprob), "%")}`]);
  }
  if (segment.entropies?.[at] !== undefined) facts.push(["entropy", number(segment.entropies[at], "nats")]);
  if (gap !== null) facts.push(["trainer − engine", `${number(gap, "nats")}, ratio ${number(Math.exp(gap))}`]);
  if (advantage !== null) facts.push(["advantage", signed(advantage)]);
  return facts;
}

/** Return the shaded tokens of a MODEL segment, or a table of their numbers. */
export function tokens(segment, index, view, advantage) {
  if (!segment.pieces) return h("pre", {}, segment.text);
  if (tabled.has(index)) return tokenTable(segment, advantage);
  const whole_ = unfolded.has(index), count = whole_ ? segment.tokens : Math.min(segment.tokens, LONG / 4);
  const spans = [];
  for (let at = 0; at < count; at += 1) {
    const shade = view.shade === "advantage"
      ? (advantage === null
        ? null
        : [advantage < 0 ? "var(--low)" : "var(--high)", Math.min(1, Math.abs(advantage) / 2)])
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
  return [
    h("pre", { class: "tokens", onpointerover: explain, onpointerleave: () => hint(null) }, spans),
    count < segment.tokens
      ? h("button", {
        onclick: () => {
          unfolded.add(index);
          view.rerender();
        },
      }, `Show all ${whole(segment.tokens)} tokens`)
      : null,
  ];
}

function tokenTable(segment, advantage) {
  const cell = (value) => h("td", {}, number(value));
  return h(
    "div",
    { class: "scroll log", tabindex: 0 },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["token", "id", "log-prob (nats)", "probability", "entropy (nats)", "trainer − engine (nats)", "advantage"]
            .map((title) => h("th", {}, title)),
        ),
      ),
      h(
        "tbody",
        {},
        segment.token_ids.map((id, at) =>
          h(
            "tr",
            {},
            h("td", {}, h("code", {}, JSON.stringify(segment.pieces[at]))),
            h("td", {}, id),
            cell(segment.logprobs?.[at]),
            h("td", {}, segment.logprobs ? number(Math.exp(segment.logprobs[at]), "%") : "–"),
            cell(segment.entropies?.[at]),
            cell(gapOf(segment, at)),
            h("td", {}, signed(advantage)),
          )
        ),
      ),
    ),
  );
}

/** Forget which texts were opened: another tree is shown. */
export function foldTexts() {
  unfolded.clear();
  tabled.clear();
}
