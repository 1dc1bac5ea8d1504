"""What a listener says of its runs to anyone who looks for one: the answer to `GET /runs`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.protocol.messages.terms import Count, Hex64, Message, Url

MOST_RUNS = 256  # at one listener
PlaceName = Annotated[str, Field(pattern="^([a-z0-9][a-z0-9-]{0,39})?$")]


class RunOffer(Message):
    """A run that is served, what it requires of workers, and how they join it."""

    place: PlaceName  # in /runs/PLACE; "": it has the listener for itself
    run: str = Field(max_length=120)  # its id, the audience of what is signed for it
    key: str = Hex64  # its coordinator's
    url: str = Url
    model: str = Field(max_length=200)
    state: Literal["running", "finished"]
    step: Count
    steps: Count
    workers: Count  # that live
    places_free: Count | None  # None: any number
    requirements: dict[str, Any]  # `[requirements]` of its config
    invite: str = Field(
        default="", max_length=4_000
    )  # an open one, for any worker with stake; "": only who was invited


class ClosedRun(Message):
    """A run that is not served now."""

    place: PlaceName
    why: str = Field(max_length=300)


class RunList(Message):
    """All runs of one listener, which signs this."""

    protocol: int
    runs: list[RunOffer] = Field(max_length=MOST_RUNS)
    closed: list[ClosedRun] = Field(default=[], max_length=MOST_RUNS)
