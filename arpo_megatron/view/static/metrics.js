// The metrics that the run page draws: name in metrics.jsonl, label, unit, fixed range or logarithmic axis.
// docs/reference/run-directory.md explains all of them.

const m = (key, label, unit = "", more = {}) => ({ key, label, unit, ...more });
const SHARE = { range: [0, 1] };

export const GROUPS = [
  {
    title: "What the policy earns",
    open: true,
    metrics: [
      m("reward", "Reward, mean of the trajectories"),
      m("success", "Success of the trajectories", "%", SHARE),
      m("held_out_success", "Held-out success", "%", { ...SHARE, points: true }),
      m("format_ok", "Format kept", "%", SHARE),
      m("groups_without_signal", "Trees whose trajectories all have the same reward", "count", { zero: true }),
    ],
  },
  {
    title: "How the policy changes",
    open: true,
    metrics: [
      m("entropy_mean", "Entropy of the policy, mean", "nats", { zero: true }),
      m("kl_old", "KL from the policy before the updates", "nats", { zero: true }),
      m("logprob_gap", "Log-prob gap of trainer and engine, largest", "nats", { log: true }),
      m("loss", "Loss"),
      m("grad_norm", "Gradient norm before clipping", "", { zero: true }),
      m("ratio_max", "Probability ratio, largest"),
      m("clip_high_share", "Tokens clipped by the upper bound", "%", { zero: true }),
      m("clip_low_share", "Tokens clipped by the lower bound", "%", { zero: true }),
      m("kl_reference", "KL from the reference policy", "nats", { zero: true }),
      m("lr", "Learning rate"),
    ],
  },
  {
    title: "How trees grow",
    open: true,
    metrics: [
      m("forks", "Forks taken", "count", { zero: true }),
      m("tool_calls_executed", "Tool calls executed", "count", { zero: true }),
      m("tool_calls_inherited", "Tool calls shared by branches", "count", { zero: true }),
      m("cached_prompt_share", "Prompt tokens from the engine's cache", "%", SHARE),
      m("unique_tokens", "Tokens of the trees, each counted once", "count", { zero: true }),
      m("flat_tokens", "Tokens of all trajectories", "count", { zero: true }),
      m("staleness", "Staleness, mean", "versions", { zero: true }),
      m("requests_repeated", "Requests repeated after failures", "count", { zero: true }),
    ],
  },
  {
    title: "Speed and memory",
    open: true,
    metrics: [
      m("tokens_per_s", "Tokens sampled per second", "count", { zero: true }),
      m("trainer/tokens_per_s", "Tokens trained per second", "count", { zero: true }),
      m("trainer/tflops", "Model TFLOP/s per rank", "", { zero: true }),
      m("trainer/mfu", "Share of the device's peak (MFU)", "%", { zero: true }),
      m("memory_peak_gb", "Memory, peak of any rank", "GB", { zero: true }),
      m("pack/imbalance", "Imbalance of the ranks' work", "%", { zero: true }),
    ],
  },
  { title: "Trees that were not trained", prefix: "dropped/", unit: "count", zero: true },
  { title: "Parts of the reward", prefix: "reward/" },
  { title: "Judge", prefix: "judge/" },
  { title: "Task selection and replay", prefix: ["selector/", "replay/"] },
];

const NO_CURVE = new Set(["step", "steps", "time", "kind"]);

/**
 * Return the groups with the metrics that the runs have. The last groups have all that no other names, and those that
 * are zero in every step.
 */
export function groupsOf(names, isZero) {
  const listable = [...names].filter((name) => !NO_CURVE.has(name) && !name.startsWith("seconds/"));
  const zeros = listable.filter(isZero), left = new Set(listable.filter((name) => !isZero(name)));
  const groups = GROUPS.map((group) => {
    const prefixes = [group.prefix ?? []].flat();
    const listed = group.metrics ?? [...left].filter((name) => prefixes.some((prefix) => name.startsWith(prefix)))
      .map((name) => m(name, name, group.unit ?? "", { zero: group.zero }));
    const found = listed.filter((metric) => left.delete(metric.key));
    return { title: group.title, open: group.open ?? false, metrics: found };
  });
  groups.push({ title: "All other metrics", open: false, metrics: [...left].sort().map((name) => m(name, name)) });
  const labels = Object.fromEntries(
    GROUPS.flatMap((group) => group.metrics ?? []).map((metric) => [metric.key, metric.label]),
  );
  groups.push({
    title: "Zero in every step",
    open: false,
    metrics: zeros.sort().map((name) => m(name, labels[name] ?? name, "", { zero: true })),
  });
  return groups.filter((group) => group.metrics.length);
}
