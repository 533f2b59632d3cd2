"""The columns of a file of trees, and which files of other programs have them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def tree_schema() -> "pa.Schema":
    """Return the columns in the order of docs/reference/run-directory.md."""
    import pyarrow as pa

    text, number = pa.string(), pa.int32()
    branch = pa.struct({"dH": pa.float64(), "probability": pa.float64(), "draw": pa.float64(), "why": text})
    tool = pa.struct({"name": text, "arguments": text, "status": text, "seconds": pa.float64(), "cached": pa.bool_()})
    routes = pa.struct({"layers": number, "top_k": number, "experts": pa.list_(pa.int16())})
    segment = pa.struct(
        {
            "role": text,
            "parent": number,
            "text": text,
            "token_ids": pa.list_(number),
            "logprobs": pa.list_(pa.float32()),
            "trainer_logprobs": pa.list_(pa.float32()),
            "entropies": pa.list_(pa.float32()),
            "policy_version": number,
            "finish": text,
            "branch": branch,
            "tool": tool,
            "routes": routes,
            "turn_rewards": text,
            "ended_s": pa.float64(),
        }
    )
    return pa.schema(
        {
            "step": number,
            "task_id": text,
            "prompt": text,
            "ground_truth": text,
            "aliases": pa.list_(text),
            "source": text,
            "begun_in_step": number,
            "grow_seconds": pa.float64(),
            "leaves": pa.list_(number),
            "rewards": pa.list_(pa.float64()),
            "accuracies": pa.list_(pa.float64()),
            "format_ok": pa.list_(pa.bool_()),
            "terms": pa.list_(pa.struct({"name": text, "values": pa.list_(pa.float64())})),
            "answers": pa.list_(text),
            "format_faults": pa.list_(text),
            "advantages": pa.list_(pa.list_(pa.float64())),
            "forks": number,
            "unique_tokens": number,
            "flat_tokens": number,
            "dropped": text,
            "replayed": number,
            "lost": text,
            "segments": pa.list_(segment),
        }
    )


def is_read_as(found: "pa.DataType", wanted: "pa.DataType") -> bool:
    """Whether Python reads both types alike. A file that another program has written again may have other widths."""
    from pyarrow import types

    if types.is_struct(wanted):
        own = {part.name: part.type for part in wanted}
        return types.is_struct(found) and all(
            is_read_as(each.type, own[each.name]) for each in found if each.name in own
        )
    if types.is_list(wanted):
        listed: bool = types.is_list(found) or types.is_large_list(found)
        return listed and is_read_as(found.value_type, wanted.value_type)
    if types.is_string(wanted):
        return bool(types.is_string(found) or types.is_large_string(found) or types.is_null(found))
    if types.is_floating(wanted):
        return bool(types.is_floating(found) or types.is_integer(found))
    return bool(types.is_integer(found)) if types.is_integer(wanted) else found == wanted
