"""A program's state is put back as it was, whatever its containers compute when they are read."""

import collections

import pytest

from tacit.training.program_state import ProgramState


class Makes(dict):
    """Gives a new object of the class that it holds, as transformers' table of activations does."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


class MakesInOrder(collections.OrderedDict):
    """The same, as a subclass of OrderedDict."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


@pytest.mark.parametrize("kind", [Makes, MakesInOrder])
def test_a_dict_that_computes_its_items_keeps_what_it_holds(kind):
    table = kind(a=list, b=set)

    def program():
        return table["a"]

    state = ProgramState(program)
    assert program() == []
    dict.__setitem__(table, "a", tuple)
    table.pop("b")
    state.restore()
    assert dict(dict.items(table)) == {"a": list, "b": set}
    assert program() == []


@pytest.mark.parametrize(
    "held",
    [{"n": 1}, collections.OrderedDict(n=1), collections.defaultdict(int, n=1),
     collections.Counter(n=1)],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_usual_dicts_are_put_back(held):
    def program():
        held["n"] = held.get("n", 0) + 1
        held["more"] = 1

    state, before = ProgramState(program), dict(held)
    program()
    state.restore()
    assert held == before
