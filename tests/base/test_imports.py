"""Functions named in files and commands, and public names, are found; errors explain why one is not."""

from __future__ import annotations

from pathlib import Path

import pytest

import mbaas
from mbaas import transforms
from mbaas.base.imports import import_named
from mbaas.errors import ConfigError


@pytest.fixture(scope="module")  # lives as long as the modules imported from it
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("named")
    (tmp_path / "named_data" / "cat").mkdir(parents=True)
    (tmp_path / "named_both" / "cat").mkdir(parents=True)
    (tmp_path / "named_both.py").write_text("def step(batch): pass\nNUMBER = 3\n")
    (tmp_path / "named_wrong.py").write_text("def step(:\n")
    (tmp_path / "named_raises.py").write_text("1 / 0\n")
    (tmp_path / "named_lacks.py").write_text("import named_not_installed\n")
    (tmp_path / "named_package").mkdir()
    (tmp_path / "named_package" / "steps.py").write_text("def step(batch): pass\n")
    return tmp_path


def test_a_module_beside_a_folder_of_its_name_is_found(folder: Path) -> None:
    assert import_named("named_both:step", folder, what="the step").__module__ == "named_both"
    assert import_named("named_package.steps:step", folder, what="the step").__module__ == "named_package.steps"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("named_data:step", "there is no named_data.py in FOLDER, and FOLDER/named_data is a folder without a program"),
        ("named_both:stop", "FOLDER/named_both.py has no 'stop'; did you mean 'step'?"),
        ("named_both:NUMBER", "the step must be a function, and 'named_both:NUMBER' is of type int"),
        ("named_nothing:step", "there is no module 'named_nothing' in FOLDER, nor an installed one"),
        ("named_package.other:step", "there is no module 'named_package.other' in FOLDER"),
        ("named_wrong:step", "importing named_wrong failed: SyntaxError: invalid syntax (named_wrong.py, line 1)"),
        ("named_raises:step", "importing named_raises failed: ZeroDivisionError: division by zero"),
        ("named_lacks:step", "importing named_lacks failed: No module named 'named_not_installed'"),
        ("queue:step", "/queue.py has no 'step'"),
        ("named_both.py:step", "there is no module 'named_both.py' in FOLDER"),
        ("./named_both:step", "the step must be 'module:function', got './named_both:step'"),
        ("named_both", "the step must be 'module:function', got 'named_both'"),
        (":step", "the step must be 'module:function', got ':step'"),
    ],
)
def test_what_cannot_be_found_is_a_sentence(folder: Path, path: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_named(path, folder, what="the step")
    assert sentence.replace("FOLDER", str(folder.resolve())) in str(caught.value)


def test_the_nearest_name_is_suggested_for_an_unknown_one():
    with pytest.raises(
        AttributeError, match=r"^module 'mbaas' has no attribute 'read_image'; did you mean 'read_images'\?$"
    ):
        _ = mbaas.read_image
    with pytest.raises(AttributeError, match=r"^module 'mbaas' has no attribute 'zzz'$"):
        _ = mbaas.zzz


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RandomRezisedCrop", "; did you mean 'RandomResizedCrop'?"),
        ("Compose", "; use Pipeline([...])"),
        ("ToTensor", "; use ToFloat() as the last transform"),
        ("zzz", ""),
    ],
)
def test_transforms_are_suggested_also_for_the_names_of_torchvision(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(transforms, name)
    assert str(caught.value) == f"module 'mbaas.transforms' has no attribute {name!r}{hint}"
