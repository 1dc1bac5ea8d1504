import pytest

from .support import ALICE, BOB, open_pool, payload


def test_a_transaction_inside_another_is_undone_with_it() -> None:
    desk = open_pool()
    with pytest.raises(RuntimeError), desk.pool.db.transaction():
        desk.pool.members.register(ALICE, payload("alice"), None)
        raise RuntimeError
    assert desk.pool.members.role(ALICE) is None and desk.kinds() == []


def test_an_error_inside_the_inner_one_undoes_the_outer_too() -> None:
    desk = open_pool()
    with pytest.raises(RuntimeError), desk.pool.db.transaction():
        desk.pool.members.register(ALICE, payload("alice"), None)
        with desk.pool.db.transaction():
            raise RuntimeError
    assert desk.pool.members.role(ALICE) is None
    desk.pool.members.register(BOB, payload("alice"), None)
    assert desk.pool.members.role(BOB) == "worker", "and no transaction is left open"
