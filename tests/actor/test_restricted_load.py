"""A checkpoint cannot run code, wherever in it the code is."""

import base64
import io
import pickle
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.restricted_load import _Reader, check_module_states
from arpo_megatron.actor.stored_weights import stored_tensors
from arpo_megatron.errors import UserError
from tests.actor import cases
from tests.actor.test_actor import new_actor

pytestmark = pytest.mark.usefixtures("one_rank")


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def metadata_of(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def into_metadata(checkpoint: Path, code: Code) -> None:
    metadata = metadata_of(checkpoint)
    metadata.planner_data = code
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def into_common_state(checkpoint: Path, code: Code) -> None:
    common = torch.load(checkpoint / "common.pt")
    torch.save({**common, "updates": code}, checkpoint / "common.pt")


def replace_object(
    checkpoint: Path, name: str, content: Any, damage: Callable[[bytes], bytes] = lambda stored: stored
) -> None:
    """Append an object to the file of shards, and let the metadata refer to it instead of an own one."""
    buffer, metadata = io.BytesIO(), metadata_of(checkpoint)
    torch.save([content], buffer)
    buffer = io.BytesIO(damage(buffer.getvalue()))
    index, stored = next((i, s) for i, s in metadata.storage_data.items() if name in i.fqn)
    file = checkpoint / stored.relative_path
    metadata.storage_data[index] = replace(stored, offset=file.stat().st_size, length=len(buffer.getvalue()))
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def into_object(checkpoint: Path, code: Code) -> None:
    replace_object(checkpoint, "rng/", code)


def into_module_state(checkpoint: Path, code: Code) -> None:
    """Transformer Engine unpickles the bytes in this tensor."""
    replace_object(checkpoint, "_extra_state", torch.frombuffer(bytearray(pickle.dumps(code)), dtype=torch.uint8))


@pytest.mark.parametrize("hide", [into_metadata, into_common_state, into_object, into_module_state])
def test_code_in_a_checkpoint_is_refused(tmp_path: Path, hide: Callable[[Path, Code], None]) -> None:
    actor, mark = new_actor(), tmp_path / "the code ran"
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cases.save(actor, checkpoint)
    hide(checkpoint, Code(mark))
    with pytest.raises(UserError, match="may run code"):
        actor.load(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("hide", [into_metadata, into_common_state])
@pytest.mark.parametrize("save", [cases.save, cases.save_weights], ids=["whole", "weights"])
def test_code_in_a_checkpoint_is_refused_by_export(
    tmp_path: Path, save: Callable[[Actor, Path], None], hide: Callable[[Path, Code], None]
) -> None:
    """`arpo export`, and with it `arpo eval` and `arpo serve` of a step."""
    actor, mark = new_actor(), tmp_path / "the code ran"
    (checkpoint := tmp_path / "checkpoint").mkdir()
    save(actor, checkpoint)
    hide(checkpoint, Code(mark))
    with pytest.raises(UserError, match="may run code") as refused:
        dict(stored_tensors(checkpoint, cases.QWEN3, "float32"))
    assert not mark.exists() and "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", pickle.dumps({}), b"\x80\x05K"], ids=["empty", "another type", "truncated"])
def test_damaged_metadata_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    actor = new_actor()
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cases.save(actor, checkpoint)
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata") as refused:
        actor.load(checkpoint)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_text_of_a_checkpoint_reaches_no_terminal(tmp_path: Path) -> None:
    """A name in it could be 100,000 characters long, or clear the screen and forge lines."""
    name = "\x1b[2J\x9b2Kfine" + "x" * 100_000
    content = f"c{name}\n{name}\n.".encode()
    (tmp_path / ".metadata").write_bytes(content)
    for read in (
        lambda: _Reader(tmp_path).read_metadata(),
        lambda: check_module_states(as_state(content), fp8=True),
    ):
        with pytest.raises(UserError) as refused:
            read()
        assert str(refused.value).isprintable() and len(str(refused.value)) < 600


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], lambda content: bytes(99)])
@pytest.mark.parametrize("where", ["common.pt", "rng/"])
def test_damaged_state_is_refused_in_one_line(tmp_path: Path, where: str, damage: Callable[[bytes], bytes]) -> None:
    actor = new_actor()
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cases.save(actor, checkpoint)
    if where == "common.pt":
        (checkpoint / where).write_bytes(damage((checkpoint / where).read_bytes()))
    else:
        replace_object(checkpoint, where, 1, damage)
    with pytest.raises(UserError, match=f"{where}.* is damaged or may run code") as refused:
        actor.load(checkpoint)
    assert "\n" not in str(refused.value)


def test_checkpoint_cannot_change_classes(tmp_path: Path) -> None:
    """Allowed names alone would let it replace `PosixPath.__fspath__`, and so redirect what this process writes."""
    actor = new_actor()
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cases.save(actor, checkpoint)
    content = (checkpoint / ".metadata").read_bytes()
    attack = b"cpathlib\nPosixPath\nN}X\x0a\x00\x00\x00__fspath__ctorch.serialization\n_get_layout\ns\x86b0"
    (checkpoint / ".metadata").write_bytes(content[:2] + attack + content[2:])
    before = Path.__fspath__
    with pytest.raises(UserError, match="it changes"):
        actor.load(checkpoint)
    assert Path.__fspath__ is before
    assert "__fspath__" not in vars(type(checkpoint))


FP8_STATE = zlib.decompress(
    base64.b85decode(
        r"c-qyKL2uJA6vxvfYqge5gK<HV&`zkkR4eM*?gW~qffRMXcF6@<ZsIn9#7P`ytcXe7Vbg|uo4N4;_!xW?4qTA<0!SQqPS#Bw8=PmU"
        r"k^Rp<FV8=}zKqRJ-^*G)4rE=F8FBoWNU_Wrrs*JJAz_Hnp-)M}iNY|VjfrJ`lLUA~++7C;J{`(4xpFA;AR%V(fV4DG9mHLvqF^pP"
        r"U6i+q>6u#0p<?x%1TkTt^}d#R+P7nQD39ch6bm@S`^fWC9<dP$2$em}6nAqKQi(H85Dtcs6b49AETu&vXn-AfWZJVWYK*v<150H-"
        r"5fzo08)JD|OhXT*SzpYmC<G1Oxl-JLFpk$i8TW%!ihGEWe&z=*;)JH~hP}s-bzRIAHkBtH0+<C9MA$_G7KNxk;v@yvMx~@_WBp?_"
        r"`2Bh7*YcY$FCR3<dhdq;*Mmf>+Y4|4F^hQQL;>0(EcGLrl)zxm!JWY89I_(R^)XHK6T1o`AH@Wv{(F)p#zA7%?HLeLFJe5Iv2@#j"
        r"l}~w6woKbpF(NulDwdgL@XoqjQRX7$M04^jRJR~;zFUaZq-4*7XT8<wG@Gqfx7lg0t|moXC(aVXGPZeQzJh446YV;02{#OFGR99P"
        r"zx;SD%`%RpRXTzLsKK5C;&9k9V6MGjE`h_^^c__xD?5_^T@LDeyrsJLaAWaygI(*aKJKiyyHjAx*Mq(A0@$+l?=gX_TgI`p46Af3"
        r"PrXMInCDgAzo2N`a*FNldb4?jqJ9I#i5Dp9SIYB(+IeYS5}Pi+OK`PY4{ois)}H=fn>T_hya3MpZ`tWkcKVgFTO|ANT|uhf?qTNR"
        r"egMr;eKKZg7NQ{u!xXrSd1Y`s;=GL`*eP`D`#2p@C-2=T@8hahsLqkMZV**Jc=q%|k;J9k&*h(m41oRsF*+Ls"
    )
)
"""State of a linear layer with delayed scaling: the recipe of Transformer Engine 2.11, four tensors, five values."""


def as_state(content: bytes) -> dict[str, torch.Tensor]:
    return {"layer._extra_state": torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def test_states_of_fp8_layers_are_accepted() -> None:
    check_module_states(as_state(FP8_STATE), fp8=True)
    with pytest.raises(UserError, match="only a model with FP8 layers"):
        check_module_states(as_state(FP8_STATE), fp8=False)


class InStorage:
    """Is unpickled by `torch.load` without limits, which a tensor's bytes within a pickle are too."""

    def __init__(self, code: Code) -> None:
        torch.save(code, buffer := io.BytesIO())
        self.content = buffer.getvalue()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return torch.storage._load_from_bytes, (self.content,)


@pytest.mark.parametrize("hide", [lambda code: code, InStorage, lambda code: [{"recipe": code}]])
def test_code_in_state_of_fp8_layer_is_refused(tmp_path: Path, hide: Callable[[Code], Any]) -> None:
    state = pickle.dumps(hide(Code(mark := tmp_path / "the code ran")))
    with pytest.raises(UserError, match="may run code"):
        check_module_states(as_state(state), fp8=True)
    assert not mark.exists()
    pickle.loads(state)  # as Transformer Engine does
    assert mark.exists()


@pytest.mark.parametrize(
    "state",
    [
        b"\x80\x04\x8c\x20transformer_engine.common.recipe\x8c\x09os.system\x93\x8c\x04true\x85R.",  # dotted name
        FP8_STATE[:-9],
        b"",
    ],
    ids=["a name within a module", "a part", "zeros"],
)
def test_other_state_of_fp8_layer_is_refused(state: bytes) -> None:
    with pytest.raises(UserError, match="may run code"):
        check_module_states(as_state(state or bytes(8)), fp8=True)
