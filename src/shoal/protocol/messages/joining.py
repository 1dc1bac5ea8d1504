"""How a node becomes a member: invite, what the run is, what the machine says of itself, and what is staked on it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.protocol.messages.terms import Count, Hex64, Message, NodeName, Role, Url


class InvitePayload(Message):
    """What the coordinator signs into an invite: who may join, in which role, until when. It is valid once."""

    run: str
    role: Role
    name: str = NodeName
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    expires_s: int
    open: bool = (
        False  # for any number of strangers, workers with enough stake, each under this name and its key's start
    )

    @model_validator(mode="after")
    def _consistent(self) -> "InvitePayload":
        if self.open and self.role != "worker":
            raise ValueError(f"an open invite is for workers, not for the role {self.role}")
        return self


class RunDescriptor(Message):
    """What a node must know about the run: the resolved config, and whose signatures are valid."""

    protocol: int
    run: str
    config: dict[str, Any]
    keys: dict[Role, list[str]]  # registered keys of the trusted roles; origin's sign manifests, validator's files


class RunOffer(Message):
    """What a run tells a machine that looks for one: what it requires of workers, and how they join it."""

    protocol: int
    run: str = Field(max_length=120)  # its id, the audience of what is signed for it
    key: str = Hex64  # its coordinator's, which signs the answer
    model: str = Field(max_length=200)
    state: Literal["running", "finished"]
    step: Count
    steps: Count
    workers: Count  # that live
    places_free: Count | None  # None: any number
    requirements: dict[str, Any]  # `[requirements]` of its config
    invite: str = Field(default="", max_length=4_000)  # open, for any worker with stake; "": only who was invited


class Capability(Message):
    """What a machine says about itself when it joins. It can shut itself out with it, and gains nothing by it."""

    memory_bytes: Count = 0
    cores: Count = 0
    device: str = Field(default="", max_length=40, pattern="^[ -~]*$")  # cpu, cuda
    engine: str = Field(default="", max_length=40, pattern="^[ -~]*$")


class Registration(Message):
    invite: str = Field(max_length=2_000)  # the Signed InvitePayload, as JSON
    url: Annotated[str, Url] | None = None  # where an origin or relay serves
    capability: Capability | None = None
    protocol: int = 1  # VERSION of whoever sends it; the first one did not say
    payer: str = Field(default="", pattern="^(0x[0-9a-fA-F]{40})?$")  # the account on a chain that stakes on this key


class Booking(Message):
    """What the operator was paid as stake, pays back, or decides, where no chain keeps stakes."""

    kind: Literal["stake", "unstake", "withdraw", "appeal", "grant", "refuse"]
    key: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    amount: int = Field(default=0, ge=0, lt=1 << 62)
    work: str = Field(default="", max_length=64, pattern="^[!-~]*$")
    statement: str = Field(default="", pattern="^([0-9a-f]{64})?$")  # a digest


class Registered(Message):
    name: str
    role: Role
