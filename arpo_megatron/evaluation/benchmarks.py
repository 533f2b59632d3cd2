"""The 13 benchmarks of the ARPO paper (arXiv 2507.19849, section 4.1) and their suites.

An entry names the reader of the released file, the metric, and the source. No data is shipped: licences differ, and
three of the sets are gated or encrypted so that models do not train on them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation import datasets as rows
from arpo_megatron.evaluation.datasets import QuestionAnswers, Row

Metric = Literal["math", "f1", "judge"]
"""`math`: equality by math-verify. `f1`: token F1 after SQuAD's normalisation. `judge`: the verdict of a model."""

HELD_OUT = "held_out"
"""The suite of a run's own held-out tasks."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A published test set: its file, how its rows are read, and the metric that grades an answer."""

    name: str
    """Name on the command line and in records, and the stem of the file."""
    title: str
    """Name in tables, as in the paper."""
    metric: Metric
    licence: str
    """Licence of the data as its publisher states it; not legal advice."""
    source: str
    """Address of the file, and how to prepare it."""
    read: Callable[[Row, Sequence[str], Sequence[str]], QuestionAnswers] = rows.plain
    """Reader of a row; raises `BadRowError` for a row that is unusable, such as a question with an image."""
    columns: tuple[tuple[str, ...], tuple[str, ...]] = (("question", "problem"), ("answer",))
    """Field names of the question and of the answer in released files."""
    also: tuple[str, ...] = ()
    """Other stems under which the file is published."""
    sha256: tuple[str, ...] = ()
    """Digests of released files that the reader was tested with; other files get a note in the report."""

    @property
    def needs_search(self) -> bool:
        """Whether its questions ask for facts."""
        return self.metric != "math"

    def read_row(self, row: Mapping[str, Any]) -> QuestionAnswers:
        """Read the question and its accepted answers from a row.

        Raises:
            BadRowError: the row is unusable.
        """
        return self.read(row, *self.columns)


_AUTHORS = "the authors' 200 questions: github.com/RUC-NLPIR/ARPO (evaluation/data/{name}/test.jsonl); all:"
_FLASHRAG = "huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets"
_MIT, _CC_BY, _CC_BY_SA = "MIT", "CC BY 4.0", "CC BY-SA 4.0"

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="aime24",
            title="AIME24",
            metric="math",
            licence="problems of the Mathematical Association of America; no licence stated",
            source="huggingface.co/datasets/HuggingFaceH4/aime_2024",
            also=("aime_2024", "aime2024"),
            sha256=("af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",),
        ),
        Benchmark(
            name="aime25",
            title="AIME25",
            metric="math",
            licence="problems of the Mathematical Association of America; no licence stated",
            source="huggingface.co/datasets/math-ai/aime25",
            also=("aime_2025", "aime2025"),
            sha256=("b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",),
        ),
        Benchmark(
            name="math500",
            title="MATH500",
            metric="math",
            licence=_MIT,
            source="huggingface.co/datasets/HuggingFaceH4/MATH-500",
            also=("math_500", "MATH-500"),
            sha256=("fba7f0faf5593e5c29028190115672e36fe4bed72f535cea8c71d393bd03ba0f",),
        ),
        Benchmark(
            name="gsm8k",
            title="GSM8K",
            metric="math",
            licence=_MIT,
            source="github.com/openai/grade-school-math (test.jsonl)",
            read=rows.after_hashes,
            sha256=("9f098df7ff4522078d6ccec27a5c38a454790fdb51131bedfaa0e490070d5394",),
        ),
        Benchmark(
            name="math",
            title="MATH",
            metric="math",
            licence=_MIT,
            source="github.com/hendrycks/math (the test split, its objects one a line)",
            read=rows.boxed,
            columns=(("question", "problem"), ("answer", "solution")),
        ),
        Benchmark(
            name="webwalker",
            title="WebWalker",
            metric="judge",
            licence="Apache 2.0",
            source=f"{_AUTHORS.format(name='webwalker')} huggingface.co/datasets/callanwu/WebWalkerQA (split main)",
            sha256=("5aa737b433dfc1cfd882c4857c492490eba0cb7c990ab35c0f322c51c24db678",),
            columns=(("question", "Question"), ("answer", "Answer")),
            also=("webwalkerqa", "WebWalkerQA"),
        ),
        Benchmark(
            name="hotpotqa",
            title="HQA",
            metric="f1",
            licence=_CC_BY_SA,
            source=f"{_AUTHORS.format(name='hotpotqa')} {_FLASHRAG} (hotpotqa/dev.jsonl)",
            columns=(("question",), ("answer", "golden_answers")),
            sha256=("072c04637a2736f355e92ee77649d1de89112f873b21b97e50171ac33497ad98",),
        ),
        Benchmark(
            name="2wiki",
            title="2Wiki.",
            metric="f1",
            licence="Apache 2.0",
            source=f"{_AUTHORS.format(name='2wiki')} {_FLASHRAG} (2wikimultihopqa/dev.jsonl)",
            sha256=("f92e028caf038c0fd861111ce811f12a50fc17324933b9b723d169913dfa9884",),
            columns=(("question",), ("answer", "golden_answers")),
            also=("2wikimultihopqa",),
        ),
        Benchmark(
            name="musique",
            title="MuSiQ.",
            metric="f1",
            licence=_CC_BY,
            source=f"{_AUTHORS.format(name='musique')} {_FLASHRAG} (musique/dev.jsonl)",
            sha256=("d238f3c3b34347019bf84136eaca6fc34882d2263fbcd3dc352ad85eb80cf1dc",),
            columns=(("question",), ("answer", "golden_answers")),
        ),
        Benchmark(
            name="bamboogle",
            title="Bamb.",
            metric="f1",
            licence=_MIT,
            source=f"{_FLASHRAG} (bamboogle/test.jsonl), or evaluation/data/bamboogle of github.com/RUC-NLPIR/ARPO",
            sha256=("e37b9c512f27f76f1bab1922972a0d7d48af8ac08dbdc41de56dcae45e5148c7",),
            columns=(("question", "Question"), ("answer", "golden_answers", "Answer")),
        ),
        Benchmark(
            name="gaia",
            title="GAIA",
            metric="judge",
            licence="gated: accept its terms, which forbid publishing it in a crawlable form",
            source="huggingface.co/datasets/gaia-benchmark/GAIA (2023, validation, metadata)",
            read=rows.without_attachment,
            columns=(("question", "Question"), ("answer", "Final answer")),
            sha256=("4b631659cb2cd9957c865b0070958fc726c5705d1700c54e75c47359057959ca",),
            also=("gaia_validation", "metadata"),
        ),
        Benchmark(
            name="hle",
            title="HLE",
            metric="judge",
            licence="MIT, gated, with a canary: keep it out of training data",
            source="huggingface.co/datasets/cais/hle (test)",
            read=rows.without_attachment,
            columns=(("question", "Question"), ("answer", "Answer")),
        ),
        Benchmark(
            name="xbench",
            title="xbench-DS",
            metric="judge",
            licence="MIT; encrypted against training on it",
            source="github.com/xbench-ai/xbench-evals (data/DeepSearch-2505.csv), encrypted as it is",
            read=rows.xor_encrypted,
            columns=(("question", "prompt"), ("answer",)),
            also=("DeepSearch-2505", "DeepSearch", "xbench_deepsearch"),
            sha256=(
                "10bdb81321e3d919c052c2c9a7095868d8bc9036f719fb25d9223043aa28c118",
                "70cac61a33f2dd1e8308cff011b718d203e680f3ce0c7fcf81a8958f5a2b0f3a",  # decrypted, as the authors have it
            ),
        ),
    )
}

SUITES: Mapping[str, tuple[str, ...]] = {
    "reasoning": (
        *("aime24", "aime25", "math500", "gsm8k", "math"),
        *("webwalker", "hotpotqa", "2wiki", "musique", "bamboogle"),
    ),
    "deepsearch": ("gaia", "hle", "webwalker", "xbench"),
}
"""Columns of the paper's tables 1 and 2, in their order."""


def select_benchmarks(text: str) -> list[Benchmark]:
    """Return the benchmarks of `NAME[,NAME]`, a list of suites and benchmarks, each once and in this order.

    Raises:
        UserError: a name is unknown.
    """
    names: dict[str, None] = {}
    for name in map(str.strip, text.split(",")):
        if name not in SUITES and name not in BENCHMARKS:
            raise UserError(
                f"--suite {name!r}: no such suite or benchmark; suites: {', '.join(SUITES)}, {HELD_OUT}; "
                f"benchmarks: {', '.join(BENCHMARKS)}"
            )
        names |= dict.fromkeys(SUITES.get(name, (name,)))
    return [BENCHMARKS[name] for name in names]
