// The keys of the page, and what those of a tree change in the address.
import { shapeOf } from "./drawing.js";
import { nextShade } from "./tokens.js";

export const KEYS = [
  ["j / k", "next or previous tree"],
  ["n / p", "next or previous trajectory"],
  ["[ / ]", "previous or next step"],
  ["f", "tree or flattened"],
  ["s", "next shade of the tokens"],
  ["g", "run page or trees"],
  ["?", "these keys"],
];

function go(list, current, by) {
  return list[Math.max(0, Math.min(list.length - 1, list.indexOf(current) + by))];
}

/**
 * Return what a key changes in the address, undefined if nothing.
 * at: the address, which is ahead of what is shown while a tree loads. shown: {query, rows, tree, steps}.
 */
export function keyChanges(key, at, { query, rows, tree, steps }) {
  const step = steps.includes(at.step) ? at.step : query.step, numbers = rows.map((row) => row.number);
  const here = step === query.step, number = here && !numbers.includes(at.tree) ? query.tree : at.tree;
  const place = { step, tree: number }, drawn = here && tree && number === query.tree;
  const clean = { leaf: null, segment: null, vs: null };
  const otherTree = (by) => (here && numbers.length ? { step, tree: go(numbers, number, by), ...clean } : undefined);
  const otherStep = (by) => ({ step: go(steps, step, by), tree: null, ...clean });
  const otherLeaf = (by) =>
    drawn ? { ...place, leaf: go(shapeOf(tree).rows, at.leaf ?? -by, by), segment: null } : undefined;
  const moves = {
    j: () => otherTree(1),
    k: () => otherTree(-1),
    "]": () => otherStep(1),
    "[": () => otherStep(-1),
    n: () => otherLeaf(1),
    p: () => otherLeaf(-1),
    f: () => ({ ...place, flat: at.flat === 1 ? null : 1 }),
    s: () => ({ ...place, shade: nextShade(at.shade ?? "entropy") }),
  };
  return moves[key]?.();
}
