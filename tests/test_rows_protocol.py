"""The protocol of rows: they sleep, wake and trade places, and one mixin says how."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import polydraft
from polydraft.rows import ByRow

SOURCE = Path(polydraft.__file__).parent
ITSELF = {"rows.py:ByRow"}
STORAGES = {
    "resize": {"models/storage.py:KeyValues"},
    "swap_rows": {"models/storage.py:KeyValues", "models/language_model.py:Context"},
}
"""Keys and values swap only their used slots, and are allocated for all rows there may come to be."""


class Texts(ByRow):
    """A tensor, one that comes later, and a list."""

    ROW_STATE = ("values_BX", "later_B", "names")

    def __init__(self, rows: int, parts: tuple[ByRow, ...] = ()) -> None:
        self.values_BX = torch.arange(2 * rows).view(rows, 2) + 1
        self.later_B: torch.Tensor | None = None
        self.names = [f"text {row}" for row in range(rows)]
        self.parts, self.calls = parts, 0

    def row_parts(self) -> tuple[ByRow, ...]:
        return self.parts

    def new_row(self, name: str) -> Any:
        return "new" if name == "names" else torch.tensor([7, 8])

    def before_rows_change(self) -> None:
        self.calls += 1


class Forgetful(Texts):
    FORGETS = True


class Plain(ByRow):
    ROW_STATE = ("values_B", "names")

    def __init__(self) -> None:
        self.values_B, self.names = torch.ones(1), ["text"]


def test_rows_sleep_and_wake_where_they_were():
    texts = Texts(4)
    address = texts.values_BX.data_ptr()
    for rows in (1, 3, 2, 4):
        texts.resize(rows, 4)
        assert texts.values_BX.data_ptr() == address
        assert texts.values_BX.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]][:rows]
        assert texts.names == ["text 0", "text 1", "text 2", "text 3"][:rows]
    assert texts.later_B is None and texts.calls == 4


def test_what_is_written_stays_while_others_sleep():
    texts = Texts(2)
    texts.resize(1, 2)
    texts.values_BX[0] = 0
    texts.names[0] = "another"
    texts.resize(2, 2)
    assert texts.values_BX.tolist() == [[0, 0], [3, 4]] and texts.names == ["another", "text 1"]


def test_rows_that_never_were_are_new():
    texts, plain = Texts(1), Plain()
    texts.resize(3, 3)
    assert texts.values_BX.tolist() == [[1, 2], [7, 8], [7, 8]] and texts.names == ["text 0", "new", "new"]
    with pytest.raises(NotImplementedError, match=r"Plain\.names"):
        plain.resize(2, 2)
    assert plain.values_B.tolist() == [1, 0], "tensors begin with zeros unless told otherwise"


def test_a_row_at_work_trades_places_with_one_that_sleeps():
    texts = Texts(3)
    texts.resize(1, 3)
    address = texts.values_BX.data_ptr()
    texts.swap_rows(0, 2)
    assert texts.values_BX.tolist() == [[5, 6]] and texts.names == ["text 2"]
    texts.resize(3, 3)
    assert texts.values_BX.tolist() == [[5, 6], [3, 4], [1, 2]] and texts.names == ["text 2", "text 1", "text 0"]
    assert texts.values_BX.data_ptr() == address


def test_rows_at_work_trade_places():
    texts = Texts(3)
    texts.swap_rows(0, 1)
    assert texts.values_BX.tolist() == [[3, 4], [1, 2], [5, 6]] and texts.names == ["text 1", "text 0", "text 2"]


def test_a_tensor_that_was_replaced_meanwhile_is_all_there_is():
    texts = Texts(3)
    texts.resize(2, 3)
    texts.values_BX = torch.tensor([[0, 1], [0, 2]])
    assert len(texts.every_row("values_BX")) == 2 and len(texts.every_row("names")) == 3
    texts.swap_rows(0, 2)
    assert texts.values_BX.tolist() == [[7, 8], [0, 2]], "the sleeping one is gone: a new row takes its place"
    texts.resize(3, 3)
    assert texts.values_BX.tolist() == [[7, 8], [0, 2], [7, 8]] and texts.names == ["text 2", "text 1", "text 0"]


def test_a_tensor_may_come_later_with_rows_for_all():
    texts = Texts(3)
    texts.resize(1, 3)
    texts.later_B = texts.keep_rows("later_B", torch.arange(3), 1)
    texts.swap_rows(0, 2)
    texts.resize(3, 3)
    assert texts.later_B is not None and texts.later_B.tolist() == [2, 1, 0]


def test_rows_that_do_not_sleep_are_forgotten():
    texts = Forgetful(3)
    texts.swap_rows(0, 2)
    texts.resize(1, 3)
    texts.resize(2, 3)
    assert texts.values_BX.tolist() == [[5, 6], [7, 8]] and texts.names == ["text 2", "new"]
    assert len(texts.every_row("values_BX")) == len(texts.every_row("names")) == 2


def test_parts_follow():
    inner = Texts(2)
    outer = Texts(2, (Texts(2, (inner,)), Forgetful(2)))
    outer.resize(1, 2)
    outer.swap_rows(0, 1)
    outer.resize(2, 2)
    assert outer.names == inner.names == ["text 1", "text 0"]
    assert outer.parts[1].names == ["new", "new"], "the one that it was swapped with had been forgotten"


def definitions(name: str) -> set[str]:
    """Classes that define a method, with their files."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if f"def {name}(" in text else ():
            for inner in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
                if isinstance(inner, ast.FunctionDef) and inner.name == name:
                    owner = node.name if isinstance(node, ast.ClassDef) else "module"
                    found.add(f"{path.relative_to(SOURCE).as_posix()}:{owner}")
    return found


@pytest.mark.parametrize("name", ["resize", "swap_rows"])
def test_the_protocol_has_one_home(name: str):
    assert definitions(name) == ITSELF | STORAGES[name], "name the attributes in ROW_STATE instead"
