"""How the processes of a run share the cores of one machine."""

from shoal.cli.preflight.cores import share_threads
from shoal.config import parse


def test_roles_that_work_at_once_share_the_cores() -> None:
    settings = parse({"coordinator": {"async_level": 1}, "workers": {"count": 1}})
    for cores in (2, 4, 8, 16):
        threads = share_threads(settings, cores)
        assert threads["learner"] + threads["worker"] + threads["validator"] <= max(cores, 3), threads


def test_roles_that_take_turns_have_all_cores_each() -> None:
    settings = parse({"coordinator": {"async_level": 0}, "workers": {"count": 2}, "validator": {"count": 1}})
    threads = share_threads(settings, 8)
    assert (threads["learner"], threads["validator"], threads["worker"]) == (8, 8, 4)
