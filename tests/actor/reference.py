"""An independent policy and loss: plain torch in float64, one flattened trajectory at a time.

It reads the parameters of a Megatron model by name and shares no code with the actor.
"""

import math

import torch
from torch import Tensor

from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.tree import RolloutTree


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply the rotary embedding to [tokens, heads, dim]; angles in float32, as models are trained and served."""
    dim = x.shape[-1]
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = positions.float()[:, None] * inverse[None]
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _attention(p: dict[str, Tensor], prefix: str, x: Tensor, spec: ModelSpec) -> Tensor:
    n, groups, per_group, dim = len(x), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
    mixed = x @ p[prefix + "linear_qkv.weight"].T
    if spec.qkv_bias:
        mixed = mixed + p[prefix + "linear_qkv.bias"]
    # Megatron keeps, group by group, its queries, its key and its value side by side.
    mixed = mixed.view(n, groups, per_group + 2, dim)
    q, k, v = mixed[:, :, :per_group].reshape(n, -1, dim), mixed[:, :, per_group], mixed[:, :, per_group + 1]
    if spec.qk_norm:
        q = _norm(q, p[prefix + "q_layernorm.weight"], spec.norm_eps)
        k = _norm(k, p[prefix + "k_layernorm.weight"], spec.norm_eps)
    positions = torch.arange(n)
    q, k = _rotate(q, positions, spec.rope_theta), _rotate(k, positions, spec.rope_theta)
    k, v = k.repeat_interleave(per_group, 1), v.repeat_interleave(per_group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(positions[None, :] > positions[:, None], -math.inf)
    mixed_values = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return mixed_values.reshape(n, -1) @ p[prefix + "linear_proj.weight"].T


def _mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, up = (x @ first.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ second.T


def _mixture(
    p: dict[str, Tensor], prefix: str, x: Tensor, spec: ModelSpec, given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute every expert on every token.

    Args:
        given: int64[n, k], experts to take, -1 if the router chooses.

    Returns:
        The output, the softmax of the router [n, experts], and the chosen experts [n, k].
    """
    scores = (x @ p[prefix + "router.weight"].T).softmax(-1)
    chosen = scores.topk(spec.experts.top_k, dim=-1).indices
    if given is not None:
        chosen = torch.where(given < 0, chosen, given)
    weights = scores.gather(1, chosen)
    if spec.experts.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    spread = torch.zeros_like(scores).scatter(1, chosen, weights)
    experts = [
        _mlp(x, *(p[f"{prefix}experts.local_experts.{number}.linear_fc{n}.weight"] for n in (1, 2)))
        for number in range(spec.experts.count)
    ]
    return sum(spread[:, number, None] * output for number, output in enumerate(experts)), scores, chosen


def logits(
    p: dict[str, Tensor],
    token_ids: Tensor,
    spec: ModelSpec,
    routes: list | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """Return the logits [n, vocabulary] of one sequence.

    Args:
        routes: receives each layer's softmax over experts and its chosen experts.
        given: int64[n, layers, k], experts to take, -1 if the routers choose.
    """
    x = p["embedding.word_embeddings.weight"][token_ids]
    for layer in range(spec.layers):
        prefix = f"decoder.layers.{layer}."
        normed = _norm(x, p[prefix + "input_layernorm.weight"], spec.norm_eps)
        x = x + _attention(p, prefix + "self_attention.", normed, spec)
        normed = _norm(x, p[prefix + "pre_mlp_layernorm.weight"], spec.norm_eps)
        if spec.experts is None:
            x = x + _mlp(normed, p[prefix + "mlp.linear_fc1.weight"], p[prefix + "mlp.linear_fc2.weight"])
            continue
        mixed, *route = _mixture(p, prefix + "mlp.", normed, spec, None if given is None else given[:, layer])
        x = x + mixed
        if routes is not None:
            routes.append(route)
    x = _norm(x, p["decoder.final_layernorm.weight"], spec.norm_eps)
    return x @ p["embedding.word_embeddings.weight" if spec.tied else "output_layer.weight"].T


def trajectory_logprobs(
    p: dict[str, Tensor], tree: RolloutTree, leaf: int, spec: ModelSpec, temperature: float = 1.0, routes=None
):
    """Return the log-probs [n - 1] of all tokens of a trajectory but the first; `routes` are those of the tree's
    segments."""
    ids = torch.from_numpy(tree.trajectory(leaf).token_ids).long()
    given = None if routes is None else torch.cat([torch.from_numpy(routes[index]) for index in tree.path(leaf)]).long()
    table = torch.log_softmax(logits(p, ids, spec, given=given) / temperature, -1)
    return table[:-1].gather(1, ids[1:, None])[:, 0]


def flat_ppo(
    p: dict[str, Tensor],
    tree: RolloutTree,
    advantages,
    weight: float,
    spec: ModelSpec,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    routes=None,
) -> Tensor:
    """Compute the textbook loss: PPO-clip with the trajectory's advantage for every MODEL token of every trajectory."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf, advantage in zip(tree.leaves(), advantages, strict=True):
        trajectory = tree.trajectory(leaf)
        new = trajectory_logprobs(p, tree, leaf, spec, routes=routes)
        mask = torch.from_numpy(trajectory.loss_mask[1:]).bool()
        ratio = (new - torch.from_numpy(trajectory.logprobs[1:]).to(new.dtype)).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            objective = torch.maximum(objective, torch.full_like(objective, dual_clip * advantage))
        total = total - weight * (objective * mask).sum()
    return total


def flat_off_policy(
    p: dict[str, Tensor],
    step: dict[str, Tensor],
    forest,
    advantages,
    spec: ModelSpec,
    *,
    ratio: str,
    correction: str,
    limit: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a batch's loss trajectory by trajectory when the old policy has other weights than the current one.

    Args:
        p: parameters of the current policy.
        step: parameters of the old policy.
        forest: trees.
        advantages: per tree, of its leaves.
        spec: the model.
        ratio: "sequence" is GSPO (arXiv 2507.18071 eq. 5), mean over trajectories; "token" is PPO-clip, token mean.
        correction: importance weights, "tis" by token or "geometric" by trajectory.
        limit: largest importance weight.
        clip_low: lower clip, as a distance from 1.
        clip_high: upper clip, as a distance from 1.
        dual_clip: bound of the dual clip for "token".

    Returns:
        The loss, and the weights of all tokens (or trajectories) before they are divided by their mean.
    """
    rows = []
    for tree, own in zip(forest, advantages, strict=True):
        for leaf, advantage in zip(tree.leaves(), own, strict=True):
            trajectory = tree.trajectory(leaf)
            mask = torch.from_numpy(trajectory.loss_mask[1:]).bool()
            new, old = (trajectory_logprobs(weights, tree, leaf, spec)[mask] for weights in (p, step))
            drawn = torch.from_numpy(trajectory.logprobs[1:]).to(new.dtype)[mask]
            gap = (old - drawn).detach()
            weight = (gap if correction == "tis" else gap.sum()[None] / max(1, len(gap))).exp().clamp(max=limit)
            rows.append((new - old.detach(), weight, float(advantage)))
    total, tokens = torch.zeros((), dtype=torch.float64), sum(len(change) for change, _, _ in rows)
    weights = torch.cat([weight for _, weight, _ in rows])
    for change, weight, advantage in rows:
        if ratio == "sequence":
            ratios, count = (change.sum() / max(1, len(change))).exp()[None], len(rows)
        else:
            ratios, count = change.exp(), tokens
        objective = torch.minimum(ratios * advantage, ratios.clamp(1 - clip_low, 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            objective = torch.maximum(objective, torch.full_like(objective, dual_clip * advantage))
        total = total - (weight / weights.mean() * objective).sum() / count
    return total, weights


def learning_rate(
    schedule: str, update: int, *, updates: int, warmup: int, peak: float = 1.0, last: float = 0.1
) -> float:
    """Return the rate of one update: linear warm-up from 0, then the schedule down to `last` times the peak."""
    if update <= warmup:
        return peak * update / warmup
    progress = (update - warmup) / (updates - warmup)
    falling = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
    return peak if schedule == "constant" else peak * (last + (1 - last) * falling)


def flat_penalties(
    p: dict[str, Tensor],
    first: dict[str, Tensor],
    tree: RolloutTree,
    weight: float,
    spec: ModelSpec,
    *,
    kl_coefficient: float,
    entropy_coefficient: float,
) -> Tensor:
    """Sum k3 (arXiv 2402.03300 eq. 4) from `first` minus entropy over every MODEL token of every trajectory."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tree.leaves():
        trajectory = tree.trajectory(leaf)
        ids, mask = torch.from_numpy(trajectory.token_ids).long(), torch.from_numpy(trajectory.loss_mask[1:]).bool()
        now, then = (torch.log_softmax(logits(weights, ids, spec), -1)[:-1] for weights in (p, first))
        away = (then - now).gather(1, ids[1:, None])[:, 0]
        entropy = -(now.exp() * now).sum(-1)
        cost = kl_coefficient * (away.exp() - 1 - away) - entropy_coefficient * entropy
        total = total + weight * (cost * mask).sum()
    return total


def flat_balance(
    p: dict[str, Tensor], trees: list[RolloutTree], spec: ModelSpec, load: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the router's loss without its coefficient, summed over layers, and the load, trajectory by trajectory.

    Args:
        load: float64[layers, experts], shares of choices; None takes those of these trajectories.
    """
    count = spec.experts.count
    scores, choices = torch.zeros(2, spec.layers, count, dtype=torch.float64)
    tokens = 0
    for tree in trees:
        for leaf in tree.leaves():
            ids = torch.from_numpy(tree.trajectory(leaf).token_ids).long()
            routes: list = []
            logits(p, ids, spec, routes)
            scores = scores + torch.stack([softmax.sum(0) for softmax, _ in routes])
            choices = choices + torch.stack([torch.bincount(chosen.flatten(), minlength=count) for _, chosen in routes])
            tokens += len(ids)
    measured = choices / choices.sum(-1, keepdim=True)
    return count * ((measured if load is None else load) * scores / tokens).sum(), measured
