from pathlib import Path

import pytest

from tools.tiny_model.readme import NOT_MEASURED, fill_readme, replace_part

TEXT = "# a\n<!-- examples -->\nold\n<!-- /examples -->\nb\n<!-- evaluation -->\n<!-- /evaluation -->\n"


def test_a_part_is_replaced_and_nothing_else() -> None:
    assert replace_part(TEXT, "examples", r"new \1") == TEXT.replace("old", r"new \1")


def test_a_part_that_the_page_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="'training'"):
        replace_part(TEXT, "training", "new")


def test_what_is_not_measured_says_so_and_the_training_log_is_summed_up(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT + "<!-- training -->\n<!-- /training -->\n")
    (tmp_path / "loss.csv").write_text(
        "step,learning_rate,chat_loss,equation_loss,gradient_norm,tokens,cpu_s,wall_s\n"
        "20,1e-3,2.0,3.0,1.0,160000,20.0,30.0\n40,1e-3,1.0,2.0,1.0,2000000,1200.0,3000.0\n"
    )
    fill_readme(tmp_path)
    text = readme.read_text()
    assert text.count(NOT_MEASURED) == 2
    assert "40 steps, 2 million tokens (padding included), 20 minutes of CPU time" in text
    assert "took 50 minutes" in text
    assert "<polyline" in (tmp_path / "loss.svg").read_text()
