"""Hugging Face to Megatron and back: same function, same gradient, same bits."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.models.mapping import Entry, ShardRule, entries, hf_shapes, plan_buckets
from arpo_megatron.models.spec import ModelSpec, MoESpec
from arpo_megatron.utils.atomic import explain_disk_errors
from arpo_megatron.weights.shards import LocalParameters
from tests.faults import small_disk
from tests.models.tiny_models import CASES, gradients, make, megatron_logprobs, reference_logprobs, sample_tokens, weigh
from tests.ranks import run_ranks


def loaded(path: Path, dtype: str = "float32"):
    from arpo_megatron.actor.model import build_model
    from arpo_megatron.weights.load import load_hf

    spec = ModelSpec.from_hf(path)
    model = build_model(spec, ParallelConfig(), dtype)
    load_hf([model], spec, path)
    return model, spec


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", CASES)
def test_megatron_computes_what_transformers_computes(case: str, tmp_path: Path) -> None:
    reference = make(tmp_path, case)
    model, _ = loaded(tmp_path)
    tokens = sample_tokens()
    expected, got = reference_logprobs(reference, tokens), megatron_logprobs(model, tokens)
    assert (expected - got).abs().max() < 1e-4


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_transformers_under_the_same_names(case: str, tmp_path: Path) -> None:
    from arpo_megatron.weights.export import hf_tensors

    reference = make(tmp_path, case)
    model, spec = loaded(tmp_path)
    tokens = sample_tokens()
    weigh(reference_logprobs(reference, tokens)).backward()
    weigh(megatron_logprobs(model, tokens)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    expected = gradients(reference)
    got = dict(hf_tensors([model], spec))
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient - got[name]).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_bit(case: str, tmp_path: Path) -> None:
    from arpo_megatron.weights.export import export_hf

    make(tmp_path / "source", case)
    model, spec = loaded(tmp_path / "source")
    export_hf([model], spec, tmp_path / "source", tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "source/model.safetensors"), load_file(tmp_path / "out/model.safetensors"))


ROUND_TRIPS = {
    2: {"tensor": ["qwen2", "qwen3moe"], "pipeline": ["llama-tied-rope3"], "expert": ["qwen3moe-tied-raw"]},
    4: {
        "tensor-pipeline": ["qwen3-tied"],
        "tensor-expert": ["qwen3moe"],
        "interleaved": ["qwen3moe-tied-raw"],
    },
}
"""Models by layout and ranks; each kind of parameter meets each way to divide one."""


@pytest.mark.parametrize("ranks", ROUND_TRIPS)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow_campaign)], ids=["few", "all"])
def test_round_trip_in_every_layout_keeps_every_bit(ranks: int, full: bool, tmp_path: Path) -> None:
    from tests.weights import roundtrip

    runs = ROUND_TRIPS[ranks]
    if full:
        runs = {name: [case for case in CASES if "moe" in case or roundtrip.LAYOUTS[name].expert == 1] for name in runs}
    references = {
        case: make(tmp_path / "models" / case, case, num_hidden_layers=4)
        for case in sorted({case for cases in runs.values() for case in cases})
    }
    run_ranks(roundtrip.main, tmp_path / "models", runs, ranks=ranks)
    for layout, case in [(layout, case) for layout, cases in runs.items() for case in cases]:
        out = tmp_path / "exported" / layout / case
        source = load_file(tmp_path / "models" / case / "model.safetensors")
        assert_same_bits(source, load_file(out / "model.safetensors"))
        if roundtrip.LAYOUTS[layout].pipeline == 1:
            expected = reference_logprobs(references[case], sample_tokens())
            assert (torch.load(out / "logprobs.pt") - expected).abs().max() < 1e-4, (layout, case)


@st.composite
def specs_and_ranks(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    groups = ranks * draw(st.integers(1, 2))
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]))
    spec = ModelSpec(
        family=family,
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 5)),
        heads=groups * draw(st.integers(1, 3)),
        kv_heads=groups,
        head_dim=draw(st.integers(1, 3)),
        ffn=ranks * draw(st.integers(1, 3)),
        vocabulary=ranks * draw(st.integers(1, 7)),
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        qkv_bias=False,
        qk_norm=False,
        max_positions=8,
        experts=MoESpec(3, 2, True, 0.0) if family == "qwen3_moe" else None,
    )
    return spec, ranks


@settings(max_examples=60)
@given(specs_and_ranks())
def test_division_among_ranks_is_lossless(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    for entry in entries(spec):
        full = {name: torch.randn(size) for name, size in entry.hf.items()}
        parameters = [fill(entry, full, rank, ranks) for rank in range(ranks)]
        assert all(parameter.isfinite().all() for parameter in parameters)
        back = {name: torch.full(size, torch.nan) for name, size in entry.hf.items()}
        for index, whole in enumerate(back.values()):
            size = tuple(whole.shape)
            for rank, parameter in enumerate(parameters):
                place = whole[entry.piece(size, rank, ranks)]
                place.copy_(entry.parts(parameter, ranks)[index].reshape(entry.part_shape(size, ranks)))
        assert_same_bits(full, back)


def fill(entry: Entry, full: dict[str, Tensor], rank: int, ranks: int) -> Tensor:
    """A rank's parameter of Megatron's shape: all parts of one width, side by side in the first dimension."""
    shapes = [entry.part_shape(size, ranks) for size in entry.hf.values()]
    parameter = torch.full((sum(shape[0] for shape in shapes), *shapes[0][1:]), torch.nan)
    for part, (name, size) in zip(entry.parts(parameter, ranks), entry.hf.items(), strict=True):
        part.copy_(full[name][entry.piece(size, rank, ranks)].view(part.shape))
    return parameter


@given(specs_and_ranks(), st.integers(1, 800))
def test_buckets_are_as_full_as_possible_and_keep_parameters_together(case: tuple[ModelSpec, int], limit: int) -> None:
    """Or one after the other the blocks of one that does not fit."""
    spec, _ = case
    sizes, tops = hf_shapes(spec), dict.fromkeys(hf_shapes(spec), 0)
    found = plan_buckets(spec, limit)
    for rows in (rows for bucket in found for rows in bucket):
        assert (rows.first, rows.size) == (tops[rows.name], sizes[rows.name])
        tops[rows.name] = rows.last
    assert tops == {name: size[0] for name, size in sizes.items()}
    assert list(dict.fromkeys(rows.name for bucket in found for rows in bucket)) == list(sizes)
    held = [sum(rows.elements for rows in bucket) for bucket in found]
    assert all(len(bucket) == 1 or all(rows.are_all for rows in bucket) for bucket in found)
    entry_of = {name: entry for entry in entries(spec) if not entry.copy for name in entry.hf}
    for size, bucket in zip(held, found, strict=True):
        entry, rows = entry_of[bucket[0].name], bucket[0]
        unit = rows.size[0] // entry.groups if entry.layout is ShardRule.GROUPS else 1
        assert rows.first % unit == rows.last % unit == 0
        assert size <= limit or (len(bucket) == 1 and rows.last - rows.first == unit)
    for entry in entry_of.values():
        homes = {index for index, bucket in enumerate(found) for rows in bucket if rows.name in entry.hf}
        total = sum(map(prod, entry.hf.values()))
        if total <= limit:  # what SGLang fuses comes together
            (home,) = homes
            assert (
                not home
                or found[home][0].name not in entry.hf
                or held[home - 1] + total > limit
                or not found[home - 1][0].are_all
            )


def test_parameters_are_found_by_the_names_of_both_layer_specs() -> None:
    experts = MoESpec(2, 1, False, 0.0)
    spec = ModelSpec("qwen3_moe", 1, 4, 2, 2, 2, 4, 8, 1e4, 1e-6, False, False, True, 8, None, experts)
    both = [entry for entry in entries(spec) if len(entry.megatron) == 2]
    assert [entry.megatron[1] for entry in both] == [
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.layers.0.mlp.experts.linear_fc1.weight1",
        "decoder.layers.0.mlp.experts.linear_fc2.weight0",
        "decoder.layers.0.mlp.experts.linear_fc2.weight1",
    ]
    weight = torch.ones(4)
    for entry in both:
        for name in entry.megatron:
            held = LocalParameters({name: weight}, frozenset([0]), frozenset([0, 1]))
            assert held.find(entry) == (name, weight)
    with pytest.raises(KeyError, match="no parameter"):
        LocalParameters({}, frozenset([0]), frozenset([1])).find(both[3])
    assert LocalParameters({}, frozenset([0]), frozenset([1])).find(both[2]) is None  # another rank's expert
    assert LocalParameters({}, frozenset([1]), frozenset([0, 1])).find(both[2]) is None  # another stage's layer


class Numbered(nn.Module):
    """A layer of another stage, named as Transformer Engine's grouped experts name their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 6
        self.mlp = nn.Module()
        self.mlp.local_expert_indices = [2, 3]
        self.mlp.experts = nn.Module()
        self.mlp.experts.linear_fc1 = nn.Module()
        for number in range(2):
            self.mlp.experts.linear_fc1.register_parameter(f"weight{number}", nn.Parameter(torch.ones(1)))


def test_local_parameters_have_numbers_of_the_whole_model() -> None:
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList([Numbered()])
    held = LocalParameters.of([chunk])
    assert set(held.parameters) == {f"decoder.layers.5.mlp.experts.linear_fc1.weight{number}" for number in (2, 3)}
    assert (held.layers, held.experts) == ({5}, {2, 3})


@pytest.mark.usefixtures("one_rank")
def test_sharded_export_loads_in_megatron_and_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from arpo_megatron.weights.export import export_hf

    reference = make(tmp_path / "source", "qwen3")
    model, spec = loaded(tmp_path / "source")
    export_hf([model], spec, tmp_path / "source", tmp_path / "out", max_shard_bytes=20_000)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(dict(reference.state_dict()), dict(opened.state_dict()))
    again, _ = loaded(tmp_path / "out")
    assert_same_bits(dict(model.named_parameters()), dict(again.named_parameters()))


@pytest.mark.usefixtures("one_rank")
def test_export_to_a_full_disk_leaves_the_old_export_and_no_partial_one(tmp_path: Path) -> None:
    from arpo_megatron.weights.export import export_hf

    make(tmp_path / "source", "qwen3")
    model, spec = loaded(tmp_path / "source")
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 2**15) as full:
        (disk / "out").mkdir()
        (disk / "out" / "older").touch()
        message = rf"disk/out could not be written \({full}\): make room"
        with pytest.raises(UserError, match=message), explain_disk_errors(disk / "out", "make room"):
            export_hf([model], spec, tmp_path / "source", disk / "out")
        assert [path.name for path in disk.rglob("*")] == ["out", "older"]


@pytest.mark.usefixtures("one_rank")
def test_export_replaces_the_directory_and_copies_the_tokenizer(tmp_path: Path) -> None:
    from arpo_megatron.weights.export import export_hf

    source, out = tmp_path / "source", tmp_path / "out"
    make(source, "qwen2")
    (source / "tokenizer.json").write_text("{}")
    (source / "optimizer.pt").write_text("not part of a model")
    (out.with_name("out.tmp")).mkdir()
    (out.with_name("out.tmp") / "half").write_text("of an interrupted export")
    out.mkdir()
    (out / "stale").write_text("of an older export")
    model, spec = loaded(source, "bfloat16")
    export_hf([model], spec, source, out)
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    expected = {name: t.bfloat16() for name, t in load_file(source / "model.safetensors").items()}
    assert_same_bits(expected, load_file(out / "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
