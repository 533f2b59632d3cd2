"""Every built-in advantage and loss in float64 from the papers' formulas, trajectory by trajectory, without sharing.

It imports numpy alone. A token that several trajectories hold appears in each of them. A loss returns the value and the
slope of each copy: with weight w the copy adds -w * value to the loss, and -w * slope to its gradient with respect to
that log-prob. `sg` in a formula means that the slope leaves that factor constant.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

Array = np.ndarray
Group = list["Trajectory"]


@dataclass
class Trajectory:
    """A trajectory with n model tokens."""

    reward: float
    turn: Array  # int[n], the turn of each token, from 0
    states: list[bytes]  # what the environment wrote before each turn
    holders: Array  # int[n], trajectories of the group that hold the token
    new: Array  # float64[n], log-probs under the policy in training
    old: Array  # under the policy of the step
    sampling: Array  # as sampled
    entropy: Array  # under the policy of the step
    tempered: Array  # log-probs under the policy of the step at another temperature
    places: Array  # int[n], the same for copies of one token
    gains: Array  # float64[turns], log p of the next turn minus that after an empty result, per token; NaN for none
    advantage: Array  # float64[n]
    weight: float  # w: 1 / (tokens of the batch) or 1 / (trajectories * n), times `factor`
    factor: float  # v: the trajectory's importance weight

    @property
    def ratio(self) -> Array:
        return np.exp(self.new - self.old)

    @property
    def mismatch(self) -> Array:
        return np.exp(self.old - self.sampling)

    def turn_mean(self, values: Array) -> Array:
        return np.array([values[self.turn == turn].mean() for turn in self.turn])


def rewards(group: Group) -> Array:
    return np.array([own.reward for own in group])


def spread(group: Group, values: Array) -> list[Array]:
    """Give every token of a trajectory the trajectory's value."""
    return [np.full(len(own.new), value) for own, value in zip(group, values, strict=True)]


def normalised(values: Array, ddof: int = 1) -> Array:
    equal = len(values) < 2 or values.max() == values.min()
    return 0 * values if equal else (values - values.mean()) / (values.std(ddof=ddof) + 1e-6)


def per_group(values: Callable[[Array], Array]) -> "AdvantageReference":
    return lambda groups: [spread(group, values(rewards(group))) for group in groups]


def leave_one_out(values: Array) -> Array:
    """arXiv 2402.14740, eq. 8."""
    total, count = values.sum(), len(values)
    return np.array([r - (total - r) / (count - 1) if count > 1 else 0.0 for r in values])


def chunks(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2512.24873, eq. 7, gamma 0.95."""
    return [[0.95 ** (len(own.states) - 1 - own.turn) * own.reward for own in group] for group in groups]


def flow(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2510.05592, eq. 5 and 7, times n: the mean over turns of the mean over tokens with weights 1 / n."""
    found = []
    for group in groups:
        values = normalised(rewards(group))
        sizes = [np.bincount(own.turn, minlength=1)[own.turn] for own in group]
        rows = zip(group, values, sizes, strict=True)
        found.append([a * len(own.new) / (len(own.states) * size) for own, a, size in rows])
    return found


def hgpo(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2602.22817, eq. 3 to 7, K 2, alpha 1, gamma 0.95."""
    found = []
    for group in groups:
        turns = [(own, number) for own in group for number in range(len(own.states))]

        def value(turn: tuple[Trajectory, int]) -> float:
            return 0.95 ** (len(turn[0].states) - 1 - turn[1]) * turn[0].reward

        def history(turn: tuple[Trajectory, int], back: int) -> list[bytes] | None:
            return None if turn[1] < back else turn[0].states[turn[1] - back : turn[1] + 1]

        def advantage(turn: tuple[Trajectory, int], turns: list = turns) -> float:
            total = weights = 0.0
            for back in range(min(2, turn[1]) + 1):
                values = np.array([value(other) for other in turns if history(other, back) == history(turn, back)])
                if values.max() > values.min():
                    total += (back + 1) * (value(turn) - values.mean()) / (values.std() + 1e-6)
                    weights += back + 1
            return total / weights if weights else 0.0

        found.append([np.array([advantage((own, number)) for number in own.turn]) for own in group])
    return found


def pivotal(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2601.03715 by its code: suffixes alone, success 1, gain 3."""
    found = []
    for group in groups:
        mean = rewards(group).mean()
        raised = [1.0 if own.reward >= 1 else (own.reward - mean) * (3 if own.reward > mean else 1) for own in group]
        found.append([np.where(own.holders == 1, a, 0.0) for a, own in zip(raised, group, strict=True)])
    return found


def rapo(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2509.24107, eq. 3 and 6."""
    informative = sum(np.ptp(rewards(group)) > 0 for group in groups)
    scale = len(groups) / max(1, informative)
    return [spread(group, scale * normalised(rewards(group), 0)) for group in groups]


def whitened(*, baseline: bool) -> "AdvantageReference":
    """arXiv 2501.03262, discount 1: over all tokens of the step."""

    def of(groups: list[Group]) -> list[list[Array]]:
        centres = [rewards(group).mean() if baseline else 0.0 for group in groups]
        if baseline and all(np.ptp(rewards(group)) == 0 for group in groups):
            return [spread(group, 0 * rewards(group)) for group in groups]
        returns = [rewards(group) - centre for group, centre in zip(groups, centres, strict=True)]
        returns = [0 * r if baseline and np.ptp(r) == 0 else r for r in returns]
        every = [spread(group, own) for group, own in zip(groups, returns, strict=True)]
        tokens = np.concatenate([np.zeros(0), *(token for group in every for token in group)])
        if len(tokens) < 2 or tokens.max() == tokens.min():
            return [[0 * own for own in group] for group in every]
        return [[(own - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for own in group] for group in every]

    return of


def information(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2603.00656 in our form, weight 0.2, scale 0.1."""
    found = []
    for group in groups:
        r = rewards(group)
        known = np.array([gain for own in group for gain in own.gains if not np.isnan(gain)])
        gate = 0.2 * 0.1 / (0.1 + (r.std(ddof=1) if len(r) > 1 else 0.0))
        rows = []
        for own, a in zip(group, normalised(r), strict=True):
            rows.append(np.full(len(own.new), a))
            for turn, gain in enumerate(own.gains):
                if not np.isnan(gain):
                    rows[-1][own.turn == turn] += gate * (gain - known.mean()) / (known.std() + 1e-6)
        found.append(rows)
    return found


def token_group(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2509.16591, eq. 9, with the limit of 5 of the authors' code."""
    found = []
    for group in groups:
        tokens = np.concatenate(spread(group, rewards(group)))
        if len(tokens) == 0 or tokens.max() == tokens.min():
            found.append(spread(group, 0 * rewards(group)))
            continue
        values = (rewards(group) - tokens.mean()) / (tokens.std() + 1e-6)
        far = any(abs(a) >= 5 for a, own in zip(values, group, strict=True) if len(own.new))
        found.append(spread(group, normalised(rewards(group)) if far else values))
    return found


def xrpo(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2510.06672, lambda 2.5, kappa 0.5."""
    found = []
    for group in groups:
        values, scores = normalised(rewards(group)), [own.sampling.mean() if len(own.new) else None for own in group]
        mean = np.mean([score for score in scores if score is not None] or [0.0])
        for row, score in enumerate(scores):
            if values[row] > 0 and score is not None:
                values[row] += min(max(2.5 * (1 - np.exp(score - mean)), 0.0), 0.5 * values[row])
        found.append(spread(group, values))
    return found


def entropy_aware(groups: list[Group]) -> list[list[Array]]:
    """arXiv 2510.14545, section 3.3, a 0.2."""
    entropies = np.concatenate([np.zeros(0), *(own.entropy for group in groups for own in group)])
    found = per_group(normalised)(groups)
    if len(entropies) == 0 or entropies.std() < 1e-8:
        return found
    return [
        [a * (1 + 0.2 * (own.entropy - entropies.mean()) / entropies.std()) for a, own in zip(row, group, strict=True)]
        for row, group in zip(found, groups, strict=True)
    ]


AdvantageReference = Callable[[list[Group]], list[list[Array]]]
ADVANTAGES: dict[str, AdvantageReference] = {
    "group": per_group(normalised),  # arXiv 2402.03300, section 4.1.2
    "centred": per_group(lambda r: r - r.mean()),  # arXiv 2503.20783
    "rloo": per_group(leave_one_out),
    "chunks": chunks,
    "flow": flow,
    "hgpo": hgpo,
    "information": information,
    "pivotal": pivotal,
    "rapo": rapo,
    "reinforce_plus_plus": whitened(baseline=False),
    "reinforce_plus_plus, group_baseline": whitened(baseline=True),
    "token_group": token_group,
    "xrpo": xrpo,
    "entropy_aware": entropy_aware,
}
"""Name, and an option that is set, -> advantages of every token of every trajectory."""

LOW, HIGH, DUAL = 0.2, 0.3, 3.0
Terms = tuple[Array, Array]
"""(values, slopes) of one trajectory's tokens."""


def clipped(ratio: Array, advantage: Array, low: Array | float, high: Array | float, most: Array | float) -> Terms:
    """PPO-clip with a dual clip (arXiv 1707.06347, eq. 7; 1912.09729, eq. 5)."""
    low, high, most = (np.broadcast_to(bound, ratio.shape) for bound in (low, high, most))
    value = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
    bounded = np.where(advantage < 0, np.maximum(value, most * advantage), value)
    return bounded, np.where(bounded == ratio * advantage, ratio * advantage, 0.0)


def ppo(own: Trajectory) -> Terms:
    return clipped(own.ratio, own.advantage, 1 - LOW, 1 + HIGH, DUAL)


def aepo(own: Trajectory) -> Terms:
    """arXiv 2510.14545: (1 + eps) / sg(r) * r above the bound where A > 0."""
    beyond = (own.advantage > 0) & (own.ratio > 1 + HIGH)
    value, slope = ppo(own)
    bound = (1 + HIGH) * own.advantage
    return np.where(beyond, bound, value), np.where(beyond, bound, slope)


def cispo(own: Trajectory) -> Terms:
    """arXiv 2506.13585, eq. 4 and 5: sg(clip(r)) A log p."""
    slope = np.clip(own.ratio, 1 - LOW, 1 + HIGH) * own.advantage
    return slope * own.new, slope


def epo(own: Trajectory) -> Terms:
    """arXiv 2509.22576, eq. 2, in the first step: PPO and lambda 0.001 times the entropy."""
    value, slope = ppo(own)
    return value + 0.001 * own.entropy, slope


def mdpo(own: Trajectory) -> Terms:
    """arXiv 2005.09814, eq. 5, t 10."""
    r = own.ratio
    return r * own.advantage - (r * np.log(r) - r + 1) / 10, r * own.advantage - r * np.log(r) / 10


def minirl(own: Trajectory) -> Terms:
    """arXiv 2512.01374, eq. 7: sg(min(new / sampling, 5)) A log p, masked where PPO would clip."""
    masked = ((own.advantage > 0) & (own.ratio > 1 + HIGH)) | ((own.advantage < 0) & (own.ratio < 1 - LOW))
    slope = np.where(masked, 0.0, np.minimum(own.ratio * own.mismatch, 5.0) * own.advantage)
    return slope * own.new, slope


def mix_ppg(own: Trajectory) -> Terms:
    """arXiv 2507.06892: the ratio to the sampling policy, clipped around that of the step's policy."""
    d = own.mismatch
    return clipped(own.ratio * d, own.advantage, d - LOW, d + HIGH, DUAL * d)


def opmd(own: Trajectory) -> Terms:
    """arXiv 2601.03715 by its code: A log p / (1 + tau), tau 1."""
    return own.advantage * own.new / 2, own.advantage / 2


def hispo(own: Trajectory) -> Terms:
    """arXiv 2603.21065, limits 0.05 and 1."""
    kept = abs(np.exp(np.log(own.mismatch).mean()) - 1) < 0.05 if len(own.new) else False
    advantage = own.advantage * kept * (abs(own.mismatch - 1) < 1.0)
    return clipped(own.ratio * own.mismatch, advantage, 1 - LOW, 1 + HIGH, DUAL)


def ipa(own: Trajectory) -> Terms:
    """arXiv 2512.24873, eq. 8 and 9, H 5."""
    drift = np.exp(own.turn_mean(own.new - own.old))
    usable = np.exp(own.turn_mean(own.old - own.sampling)) <= 5.0
    slope = usable * np.where(own.advantage > 0, 1.0, np.minimum(drift, 1.0)) * own.advantage
    return slope * own.new, slope


def gspo(own: Trajectory) -> Terms:
    """arXiv 2507.18071, eq. 5 to 7; eq. 13 and 14 if advantages differ in a trajectory. The mean is over sequences."""
    s = np.full(len(own.new), np.exp((own.new - own.old).mean()) if len(own.new) else 1.0)
    return clipped(s, own.advantage, 1 - LOW, 1 + HIGH, np.inf)


def seeupo(own: Trajectory, back: int = 0) -> Terms:
    """arXiv 2602.06554: the turn `back` turns before the last, its advantage times the ratios of all later turns."""
    place = len(own.states) - 1 - back
    here = own.turn == place
    drift = own.new - own.old
    later = np.prod([np.exp(drift[own.turn == turn].mean()) for turn in range(max(place, 0) + 1, len(own.states))])
    ratio = np.exp(drift[here].mean()) if here.any() else 1.0
    value, slope = clipped(np.full(len(drift), ratio), own.advantage * later * here, 1 - LOW, 1 + HIGH, 1e30)
    return value, here * (slope.sum() / max(1, here.sum()))


def bapo(batch: list[Trajectory]) -> list[Terms]:
    """arXiv 2510.18927, algorithm 1, with order, ranges and steps of the authors' code."""
    low, high = 0.6, 1.2

    def balanced() -> bool:
        gain = sum(w.weight * (np.maximum(w.advantage, 0) * np.minimum(w.ratio, high)).sum() for w in batch)
        cost = -sum(w.weight * (np.minimum(w.advantage, 0) * np.maximum(w.ratio, low)).sum() for w in batch)
        return bool(gain >= 0.5 * (gain + cost))

    while not balanced() and low < 0.9:
        low = min(low + 0.05, 0.9)
    while not balanced() and high < 3.0:
        high = min(high + 0.05, 3.0)
    return [clipped(own.ratio, own.advantage, low, high, DUAL) for own in batch]


def clip_cov(batch: list[Trajectory]) -> list[Terms]:
    """arXiv 2505.22617, eq. 10 and 11, with a share of 1: every candidate loses its gradient."""
    mean_a, mean_p = (np.concatenate([getattr(own, name) for own in batch]).mean() for name in ("advantage", "new"))
    found = []
    for own in batch:
        beyond = ((own.advantage > 0) & (own.ratio > 1 + HIGH)) | ((own.advantage < 0) & (own.ratio < 1 - LOW))
        covariance = (own.advantage - mean_a) * (own.new - mean_p)
        kept = beyond | (covariance <= 1) | (covariance >= 5)
        value, slope = clipped(own.ratio, own.advantage, 1 - LOW, 1 + HIGH, np.inf)
        found.append((kept * value, kept * slope))
    return found


def entropy_target(batch: list[Trajectory]) -> list[Terms]:
    """arXiv 2510.08141 by its code (DCPO), target 0.5, at most 0.1; a trajectory is good if A > 0.05 somewhere."""
    once = {place: h for own in batch for place, h in zip(own.places, own.entropy, strict=True)}
    share = np.mean([bool((own.advantage > 0.05).any()) for own in batch])
    pull = min(abs(0.5 - np.mean(list(once.values()))), 0.1) / share if share else 0.0
    a = pull / (1 + pull)
    found = []
    for own in batch:
        tempered = (own.advantage > 0.05) * np.exp(own.tempered - own.old)
        found.append(clipped(own.ratio, (1 - a) * own.advantage + a * tempered, 1 - LOW, 1 + HIGH, DUAL))
    return found


def hapo(batch: list[Trajectory]) -> list[Terms]:
    """arXiv 2509.16591, eq. 5, 6 and 10 to 13, pivot 0.8."""
    logs = [np.log(np.maximum(own.entropy, 1e-8)) for own in batch]
    pivot = np.quantile(np.concatenate(logs), 0.8, method="nearest")
    heights = [own - pivot for own in logs]
    top, bottom = np.concatenate(heights).max(), -np.concatenate(heights).min()
    found = []
    for own, height in zip(batch, heights, strict=True):
        h = np.where(height > 0, height / max(top, 1e-8), height / max(bottom, 1e-8))
        high = np.where(h > 0, HIGH * (1 + h), HIGH)
        low = np.where(h > 0, LOW, LOW * (1 - h))
        inside = (own.ratio > 1 - low / 2) & (own.ratio < 1 + high / 2)
        advantage = own.advantage * np.where((h > 0) != inside, 1 + h, 1.0)
        found.append(clipped(own.ratio, advantage, 1 - low, 1 + high, DUAL))
    return found


def each(terms: Callable[[Trajectory], Terms]) -> "LossReference":
    return lambda batch: [terms(own) for own in batch]


LossReference = Callable[[list[Trajectory]], list[Terms]]
LOSSES: dict[str, LossReference] = {
    "aepo": each(aepo),
    "bapo": bapo,
    "cispo": each(cispo),
    "clip_cov": clip_cov,
    "entropy_target": entropy_target,
    "epo": each(epo),
    "gspo": each(gspo),
    "hapo": hapo,
    "hispo": each(hispo),
    "ipa": each(ipa),
    "mdpo": each(mdpo),
    "minirl": each(minirl),
    "mix_ppg": each(mix_ppg),
    "opmd": each(opmd),
    "ppo": each(ppo),
    "seeupo": each(seeupo),
}
"""Name -> (values, slopes) of every trajectory."""


def weighted(batch: list[Trajectory], aggregation: str) -> list[Trajectory]:
    """Set the weights of `loss_aggregation`."""
    total = sum(len(own.new) for own in batch)
    return [
        replace(
            own,
            weight=own.factor
            * (1 / max(1, total) if aggregation == "token-mean" else 1 / (len(batch) * max(1, len(own.new)))),
        )
        for own in batch
    ]
