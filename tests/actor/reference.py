"""An independent policy and loss: plain torch in float64, one flattened trajectory at a time.

It reads the parameters of a Megatron model by name and shares no code with the actor.
"""

import math

import torch
from torch import Tensor

from arpo_megatron.tree import RolloutTree
from arpo_megatron.weights.shape import ModelShape


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [tokens, heads, dim]; angles in float32, as models are trained and served."""
    dim = x.shape[-1]
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = positions.float()[:, None] * inverse[None]
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _attention(p: dict[str, Tensor], prefix: str, x: Tensor, shape: ModelShape) -> Tensor:
    n, groups, per_group, dim = len(x), shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
    mixed = x @ p[prefix + "linear_qkv.weight"].T
    if shape.qkv_bias:
        mixed = mixed + p[prefix + "linear_qkv.bias"]
    # Megatron keeps, group by group, its queries, its key and its value side by side.
    mixed = mixed.view(n, groups, per_group + 2, dim)
    q, k, v = mixed[:, :, :per_group].reshape(n, -1, dim), mixed[:, :, per_group], mixed[:, :, per_group + 1]
    if shape.qk_norm:
        q = _norm(q, p[prefix + "q_layernorm.weight"], shape.norm_eps)
        k = _norm(k, p[prefix + "k_layernorm.weight"], shape.norm_eps)
    positions = torch.arange(n)
    q, k = _rotate(q, positions, shape.rope_theta), _rotate(k, positions, shape.rope_theta)
    k, v = k.repeat_interleave(per_group, 1), v.repeat_interleave(per_group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(positions[None, :] > positions[:, None], -math.inf)
    mixed_values = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return mixed_values.reshape(n, -1) @ p[prefix + "linear_proj.weight"].T


def logits(p: dict[str, Tensor], token_ids: Tensor, shape: ModelShape) -> Tensor:
    """[n, vocabulary] for one sequence."""
    x = p["embedding.word_embeddings.weight"][token_ids]
    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}."
        normed = _norm(x, p[prefix + "input_layernorm.weight"], shape.norm_eps)
        x = x + _attention(p, prefix + "self_attention.", normed, shape)
        normed = _norm(x, p[prefix + "pre_mlp_layernorm.weight"], shape.norm_eps)
        gate, up = (normed @ p[prefix + "mlp.linear_fc1.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ p[prefix + "mlp.linear_fc2.weight"].T
    x = _norm(x, p["decoder.final_layernorm.weight"], shape.norm_eps)
    return x @ p["embedding.word_embeddings.weight" if shape.tied else "output_layer.weight"].T


def trajectory_logprobs(
    p: dict[str, Tensor], tree: RolloutTree, leaf: int, shape: ModelShape, temperature: float = 1.0
):
    """Log-probs of all tokens of one trajectory but the first, [n - 1]."""
    ids = torch.from_numpy(tree.trajectory(leaf).token_ids).long()
    table = torch.log_softmax(logits(p, ids, shape) / temperature, -1)
    return table[:-1].gather(1, ids[1:, None])[:, 0]


def flat_ppo(
    p: dict[str, Tensor],
    tree: RolloutTree,
    advantages,
    weight: float,
    shape: ModelShape,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """The textbook loss: for every trajectory and every model token on it, PPO-clip with the trajectory's advantage."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf, advantage in zip(tree.leaves(), advantages, strict=True):
        trajectory = tree.trajectory(leaf)
        new = trajectory_logprobs(p, tree, leaf, shape)
        mask = torch.from_numpy(trajectory.loss_mask[1:]).bool()
        ratio = (new - torch.from_numpy(trajectory.logprobs[1:]).to(new.dtype)).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            objective = torch.maximum(objective, torch.full_like(objective, dual_clip * advantage))
        total = total - weight * (objective * mask).sum()
    return total
