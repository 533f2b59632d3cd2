// Addresses, keys, polling and the header.
import { h, hint, show } from "./dom.js";
import { exported, growAt, load, LoadError } from "./data.js";
import { COLORS, runPage } from "./run.js";
import { chosenRows, treePage } from "./trees.js";
import { plural, stepName } from "./format.js";
import { keyChanges, KEYS } from "./keys.js";
import { nextTheme, themeName } from "./theme.js";

const EVERY = 3000;
const PATH = ["kind", "name", "missing", "step", "tree"]; // the others are the query of an address
const main = document.getElementById("main"), header = document.getElementById("header");
const now = { runs: [], pages: {}, error: null, keys: [], treeKey: null, current: null, help: false };

/** Read the address: #/run/NAME?... or #/trees/NAME/STEP/NUMBER?... */
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, name, step, tree] = path.split("/").map(decodeURIComponent);
  const params = Object.fromEntries(new URLSearchParams(query ?? ""));
  for (const key of ["leaf", "vs", "segment", "flat"]) {
    params[key] = params[key] === undefined ? null : Number(params[key]);
  }
  return {
    ...params,
    kind: kind === "trees" ? "trees" : "run",
    name: now.runs.includes(name) ? name : now.runs[0],
    missing: name && !now.runs.includes(name) ? name : undefined,
    step,
    tree: tree === undefined ? null : Number(tree),
  };
}

function href(to) {
  const path = to.kind === "trees"
    ? ["trees", to.name, to.step, ...(to.tree === null || to.tree === undefined ? [] : [to.tree])]
    : ["run", to.name];
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(to)) {
    if (PATH.includes(key) || value === null || value === undefined) continue;
    query.set(key, value);
  }
  const text = query.toString();
  return `#/${path.filter((part) => part !== undefined).map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Change parts of the address; the page follows. */
function change(changes, history = "replaceState") {
  window.history[history](null, "", href({ ...route(), ...changes }));
  refresh();
}

function shownRuns(at) {
  if (at.with === undefined) return now.runs.slice(0, COLORS.length);
  return now.runs.filter((name) => name === at.name || at.with.split("|").includes(name));
}

function drawHeader(at) {
  const shown = shownRuns(at), many = now.runs.length > 1;
  const toggle = (name) =>
    change({
      with: shown.includes(name) ? shown.filter((each) => each !== name).join("|") : [...shown, name].join("|"),
    });
  show(
    header,
    h(
      "nav",
      { "aria-label": "Pages" },
      h("a", { class: "brand", href: href({ kind: "run", name: at.name }) }, "arpo view"),
      h("a", {
        href: href({ kind: "run", name: at.name, with: at.with }),
        "aria-current": at.kind === "run" ? "page" : null,
      }, "Run"),
      h("a", { href: treesLink(at.name), "aria-current": at.kind === "trees" ? "page" : null }, "Trees"),
    ),
    many
      ? h(
        "div",
        { class: "runs", role: "group", "aria-label": "Runs" },
        now.runs.map((name) =>
          h(
            "span",
            {
              class: `run${name === at.name ? " on" : ""}`,
              vars: { "--c": COLORS[shown.indexOf(name) % COLORS.length] ?? "var(--line)" },
            },
            h("input", {
              type: "checkbox",
              "data-key": `with ${name}`,
              "aria-label": `draw ${name}`,
              checked: shown.includes(name),
              disabled: name === at.name,
              onchange: () => toggle(name),
            }),
            h("button", {
              class: "plain",
              "data-key": `run ${name}`,
              onclick: () => change({ kind: at.kind, name, step: undefined, tree: null }, "pushState"),
            }, name),
          )
        ),
      )
      : null,
    h(
      "div",
      { class: "right" },
      exported ? null : h(
        "span",
        { class: `live${now.error ? " off" : ""}`, title: now.error ?? "The page follows the run" },
        now.error ? "no connection" : "live",
      ),
      h("button", { class: "plain", "data-key": "theme", onclick: changeTheme }, themeName()),
      h("button", {
        class: "plain",
        "data-key": "help",
        "aria-expanded": String(now.help),
        onclick: () => {
          now.help = !now.help;
          drawHeader(at);
        },
      }, "keys"),
    ),
    now.help
      ? h("dl", { class: "keys" }, KEYS.map(([key, text]) => h("div", {}, h("dt", {}, key), h("dd", {}, text))))
      : null,
  );
}

function treesLink(name, step, task) {
  const steps = now.pages[name]?.tree_steps ?? [];
  return href({
    kind: "trees",
    name,
    step: step ?? (steps.length ? String(steps[steps.length - 1]) : undefined),
    find: task,
  });
}

function exportNote() {
  if (!now.exported) return null;
  const left = now.exported.trees_left_out;
  return h(
    "p",
    { class: "note" },
    `Saved on ${now.exported.made}. `,
    left
      ? `${plural(left, "stored tree")} ${
        left === 1 ? "is" : "are"
      } not in this file; arpo view RUN_DIR shows all of them.`
      : "All stored trees are in this file.",
  );
}

async function refresh() {
  const at = route(), turn = (now.turn = (now.turn ?? 0) + 1);
  try {
    const list = await load();
    now.runs = list.runs;
    now.exported = list.export;
    now.grow = Boolean(list.grow);
    const here = route();
    const wanted = [...new Set([here.name, ...(here.kind === "run" ? shownRuns(here) : [])])];
    await Promise.all(wanted.map(async (name) => {
      now.pages[name] = await load(name);
    }));
    const content = here.kind === "run" ? await runContent(here) : await treeContent(here);
    now.error = null;
    if (turn !== now.turn) return;
    drawHeader(here);
    if (content.signature !== now.current) {
      const lost = here.missing ? [`No run ${here.missing} is shown here; this is ${here.name}.`] : [];
      const notes = [...lost, ...(content.notes ?? [])].map((text) => h("p", { class: "note", role: "status" }, text));
      show(main, exportNote(), ...notes, ...[content.draw()].flat());
      now.current = content.signature; // not earlier: another turn may have overtaken this one before it was shown
    }
    document.title = `${here.name} · arpo view`;
    now.drawnTurn = turn;
    if (here.kind === "trees" && now.tree) now.keys.splice(0).forEach(pressOnTree);
    if (now.to !== undefined) {
      main.querySelector(`[data-segment="${now.to}"]`)?.scrollIntoView({ block: "nearest", behavior: "smooth" });
      delete now.to;
    }
  } catch (error) {
    const offline = error instanceof LoadError && error.offline;
    now.error = offline ? error.message : null;
    if (now.runs.length) drawHeader(at);
    if (!(error instanceof LoadError)) console.error(error);
    if (turn === now.turn && (!now.current || !offline)) {
      show(main, h("p", { class: "problem", role: "alert" }, error.message));
      now.current = null;
    }
  }
}

/** Redraw although the address and the data are the same: something was opened or closed. */
function rerender() {
  now.drawn = (now.drawn ?? 0) + 1;
  refresh();
}

async function runContent(at) {
  const shown = shownRuns(at);
  const services = exported || now.pages[at.name].state !== "running" ? [] : await load(at.name, "services");
  const quarter = Math.floor(Date.now() / 15000); // "12 s ago" is drawn again now and then
  const signature = JSON.stringify([
    at,
    now.drawn,
    quarter,
    shown.map((
      name,
    ) => [name, now.pages[name].step, now.pages[name].state, now.pages[name].phase, now.pages[name].last_event?.time]),
    services.map((one) => [one.up, one.restarts]),
    now.pages[at.name].damaged,
  ]);
  const draw = () =>
    runPage({
      main: at.name,
      shown,
      pages: now.pages,
      services,
      axis: at.x ?? "step",
      link: change,
      rerender,
      treesLink,
    });
  return { signature, draw };
}

/** Return the answer at an address and no fault, or `instead` and the server's words: a damaged file is named. */
async function loadOr(instead, ...address) {
  try {
    return [await load(...address), null];
  } catch (error) {
    if (!(error instanceof LoadError) || error.offline) throw error;
    return [instead, error.message];
  }
}

async function treeContent(at) {
  const page = now.pages[at.name],
    steps = [...page.tree_steps.map(String), ...page.held_out_tree_steps.map((step) => `held-out-${step}`)];
  if (!steps.length) {
    return {
      signature: `no trees ${at.name}`,
      draw: () =>
        h("p", { class: "quiet" }, "This run has stored no trees yet. The page shows them after the first step."),
    };
  }
  const step = steps.includes(at.step)
    ? at.step
    : page.tree_steps.length
    ? String(page.tree_steps[page.tree_steps.length - 1])
    : steps[0];
  const [rows, rowsFault] = await loadOr([], at.name, "trees", step);
  const notes = at.step === undefined || step === at.step
    ? []
    : [`No trees of ${stepName(at.step)} are here; these are those of ${stepName(step)}.`];
  const chosen = chosenRows(rows, at),
    asked = notes.length ? null : at.tree,
    number = rows.some((row) => row.number === asked)
      ? asked
      : (chosen.find((row) => row.forks && new Set(row.rewards).size > 1) ?? chosen[0])?.number ?? null;
  const key = JSON.stringify([at.name, step, number, rows.find((row) => row.number === number)]);
  if (asked !== null && asked !== number && !rowsFault) {
    notes.push(`No tree ${asked} of ${stepName(step)} is here${number === null ? "" : `; this is tree ${number}`}.`);
  }
  const query = { ...at, step, tree: number, missing: undefined };
  // A large tree takes seconds: it is not asked for again unless its row is another (a resumed run repeats steps).
  const known = number === null ? null : now.loaded?.key === key ? now.loaded.tree : undefined;
  if (known === undefined) now.tree = { query, rows: chosen, tree: null, steps }; // for keys pressed while it loads
  const [tree, treeFault] = known === undefined ? await loadOr(null, at.name, "trees", step, number) : [known, null];
  now.loaded = treeFault ? null : { key, tree };
  const tasks = tasksOf(at.name, tree), fault = rowsFault ?? treeFault;
  const signature = JSON.stringify([query, at.missing, steps, main.clientWidth, now.drawn, tasks, notes, fault]);
  const growing = now.grow
    ? {
      state: now.growing?.key === key ? now.growing : {},
      start: (segment, count) => grow(at.name, step, number, key, segment, count),
    }
    : null;
  const link = (changes, more) => {
    now.to = more?.to;
    change({ ...query, ...changes });
  };
  const draw = () => {
    const fresh = key !== now.treeKey;
    now.treeKey = key;
    now.tree = { query, rows: chosen, tree, steps };
    return treePage({
      page,
      rows,
      query,
      tree,
      tasks,
      fault,
      growing,
      fresh,
      width: main.clientWidth - (window.innerWidth > 900 ? 360 : 28),
      link,
      rerender,
      href: (changes) => href({ ...query, ...changes }),
    });
  };
  return { signature, draw, notes };
}

/** Sample continuations of a tree's segment, and show them. */
async function grow(name, step, number, key, segment, count) {
  now.growing = { key, segment, count, busy: true };
  rerender();
  try {
    const tree = await growAt(name, step, number, segment, count);
    now.growing = { key, segment, count };
    if (now.loaded?.key === key) now.loaded.tree = tree;
    const at = route(), shown = now.loaded?.key === key && at.kind === "trees";
    if (shown) change({ leaf: tree.leaves.length - count, vs: null });
  } catch (error) {
    if (!(error instanceof LoadError)) throw error;
    now.growing = { key, segment, count, error: error.message };
  }
  rerender();
}

/** Return where else a task is stored. A long run takes seconds for that: the page is drawn again when it is known. */
function tasksOf(name, tree) {
  if (!tree || exported) return [];
  const { tree_steps: trained, held_out_tree_steps: heldOut } = now.pages[name];
  const key = JSON.stringify([name, tree.task, trained.length, heldOut.length]);
  if (now.tasks?.key !== key) {
    now.tasks = { key, found: [] };
    load(name, "task", tree.task).then((found) => {
      if (now.tasks.key === key) {
        now.tasks.found = found;
        refresh();
      }
    }, () => {});
  }
  return now.tasks.found;
}

function changeTheme() {
  nextTheme();
  drawHeader(route());
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(input|select|textarea)$/i.test(event.target.tagName)) return;
  const at = route();
  if (event.key === "?") {
    now.help = !now.help;
    drawHeader(at);
    return;
  }
  if (event.key === "Escape") {
    hint(null);
    now.help = false;
    drawHeader(at);
    return;
  }
  if (event.key === "g") {
    window.location.hash = at.kind === "run" ? treesLink(at.name) : href({ kind: "run", name: at.name });
    return;
  }
  if (at.kind !== "trees" || !now.tree) return;
  pressOnTree(event.key);
}

/** Do what a key of the tree page does; while what it needs loads, keep it for later. */
function pressOnTree(key) {
  const at = route(), changes = now.tree.query.name === at.name ? keyChanges(key, at, now.tree) : undefined;
  if (changes) change(changes);
  else if (now.turn !== now.drawnTurn && "jknp".includes(key)) now.keys.push(key);
}

let resized;
window.addEventListener("hashchange", () => {
  hint(null);
  window.scrollTo(0, 0);
  refresh();
});
window.addEventListener("keydown", press);
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(refresh, 150);
});
await refresh();
if (!exported) {
  setInterval(() => {
    if (!document.hidden) refresh();
  }, EVERY);
}
