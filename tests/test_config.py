"""A wrong word in a config is one clear line before anything starts."""

from pathlib import Path

import pytest

from arpo_megatron import resolve
from arpo_megatron.errors import UserError


@pytest.mark.parametrize("recipe", resolve.recipe_names())
def test_every_recipe_survives_saving_and_loading(recipe: str, tmp_path: Path) -> None:
    config = resolve.resolve(recipe)
    resolve.save(config, tmp_path / "config.yaml")
    assert resolve.load(tmp_path / "config.yaml") == config


def test_words_win_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 5, tasks_per_step: 4}\noptimizer: {lr: 1e-5}\n")
    config = resolve.resolve("quickstart", file=file, words=["train.steps=7"])
    assert (config.train.steps, config.train.tasks_per_step, config.optimizer.lr) == (7, 4, 1e-5)
    assert config.algorithm == resolve.resolve("quickstart").algorithm


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["algorithm.entropy_wieght=0.3"], "did you mean algorithm.entropy_weight?"),
        (["algorithm.lr=0.3"], "did you mean optimizer.lr?"),
        (["lr=0.3"], "did you mean optimizer.lr?"),
        (["trian.steps=3"], "did you mean train?"),
        (["zzz=1"], "keys here: name, seed"),
        (["algorithm.samples=many"], "algorithm.samples: input should be a valid integer"),
        (["optimizer.lr=-1"], "greater than 0, not -1"),
        (["algorithm.initial=99"], "algorithm.initial=99 exceeds algorithm.samples"),
        (["parallel.sequence=true"], "needs parallel.tensor > 1"),
        (["parallel.tensor=5"], "not a multiple of parallel.tensor=5"),
        (["algorithm.minibatches=99"], "exceeds train.tasks_per_step"),
        (["algorithm=3"], "algorithm"),
        (["steps"], "section.key=value"),
        (["=3"], "section.key=value"),
        (["train.=3"], "section.key=value"),
    ],
)
def test_a_wrong_word_is_one_line_that_helps(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", words=words)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_recipe_is_suggested() -> None:
    with pytest.raises(UserError, match="did you mean quickstart"):
        resolve.resolve("quikstart")


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2\n", "1: 2\n", "\x00"])
def test_an_unusable_file_is_one_line(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", file=file)
    assert "bad.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        resolve.resolve("quickstart", file=tmp_path / "nowhere.yaml")
