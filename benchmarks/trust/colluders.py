"""A real pool in virtual time, in which some of three validators collude. `matrix` plays attacks in it.

There is no model: the benchmark knows which files are false, and honest validators sign the truth. Colluders claim work
before anybody else does, treat the work of one worker as the attack says, and all other work honestly. An honest
validator can judge only versions that relays still hold. Files, opinions, the learner's records and the ledger are
real, so the real audit runs. Left out: HTTP, weights, shares of checks below 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.cli.audit.audit import audit
from shoal.cli.audit.run import DATABASE, BrokenError
from shoal.config import dumps, parse
from shoal.coordinator.database import PoolError, record_start, seal
from shoal.coordinator.pool import TABLE_NAMES, Pool
from shoal.coordinator.submissions import Submission
from shoal.learner.groups import Gathering
from shoal.learner.report import DOMAIN
from shoal.ledger.chain import sign_opinion
from shoal.ledger.connection import open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import run_id
from shoal.protocol.messages import (
    HARD,
    Assignment,
    BatchGroup,
    Claim,
    Computed,
    Fingerprint,
    GroupResult,
    Heartbeat,
    InvitePayload,
    Opinion,
    PolicyVersion,
    Reason,
    Replay,
    StepRecord,
    StepReport,
    ToleranceSpent,
    Verdict,
)
from shoal.shardcast.store import KEEP
from shoal.store.folder import Folder
from shoal.store.rollouts import SCHEMA_VERSION, AcceptedRollout, Header, Rollout, write_accepted, write_submission
from shoal.watch.record import RunRecord

STEPS, GROUPS, SIZE, TOKENS, MAX_TOKENS = 8, 2, 2, 3, 64  # TOKENS: of a rollout; MAX_TOKENS: allowed
ROUND_S, MAX_ROUNDS = 20.0, 200
WARM_UP = 4  # rounds in which no group is useful, so that later ones fill batches although some work is held
DRAWN = 4  # every DRAWN-th accepted submission gets a second opinion


def identity(number: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


COORDINATOR, LEARNER, ALICE, BOB, FRIEND, *VALIDATORS = map(identity, range(1, 9))
WORKERS = (ALICE, BOB, FRIEND)
NAMES = {"learner": LEARNER, "alice": ALICE, "bob": BOB, "friend": FRIEND}
NAMES |= dict(zip(("first", "second", "third"), VALIDATORS, strict=True))
RUN = run_id("matrix", COORDINATOR.public)
HONEST = ToleranceSpent(
    exposure=3.0,
    beyond=(0, 0, 0, 0),
    better=0.0,
    worse=0.0,
    easier=0.0,
    harder=0.0,
    proof_exponent_mean=0.1,
    proof_mantissa_mean=0.1,
    logprob_error_mean=0.001,
    distribution=0.0,
)

# --- attacks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What a validator says about one file."""

    reason: Reason | None = None
    replay: Replay | None = None
    spent: ToleranceSpent = HONEST
    tokens: int = TOKENS * SIZE  # of each group
    groups: int = GROUPS
    useful: bool | None = None  # None: as the rewards say
    reward: float = 0.0  # added to each reward in the accepted file
    about: str = ""  # signed for another "submission" or "file"
    stores: str = "its file"  # "garbage" or "nothing"


@dataclass(frozen=True)
class Attack:
    """What colluding validators do to the work of one worker. They treat all other work honestly."""

    said: Said | None  # None: they claim work and do not answer
    target: Identity = ALICE
    when: str = "at once"  # "late": once relays have dropped the version; "at the end": after the last step
    claims: bool = True
    repeats: tuple[Said, ...] = ()  # further verdicts on the same file
    in_class: tuple[Identity, ...] = ()  # honest nodes and friends that have the colluders' fingerprint
    truth: Reason | None = None  # why honest validators reject the friend's files
    flat: bool = False  # the friend's groups have equal rewards

    @property
    def forges(self) -> bool:
        """Return whether training on the accepted file would be training on a lie."""
        false = self.said is not None and (bool(self.said.reward) or self.said.stores != "its file")
        return false or self.truth is not None or self.flat


@dataclass(frozen=True)
class Cell:
    honest: str  # the worst that happened to Alice or Bob, in the order of HARMS
    friend: str  # what an attack for a friend got it; "" for other attacks
    trained: bool  # the learner trained on a lie
    stalls: bool  # a step takes minutes, because work waits for validators
    found: tuple[str, ...]  # who notices

    def __str__(self) -> str:
        words = [f"honest {self.honest}", f"friend {self.friend}" * bool(self.friend), "trained on it" * self.trained]
        words.append("stalls" * self.stalls)
        return ", ".join(filter(None, words)) + "; found by " + (", ".join(self.found) or "nobody")


HARMS = ("paid", "paid less", "waits", "unpaid", "suspended", "dismissed", "slashed")


# --- a pool ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uploaded:
    header: Header
    rows: list[Rollout]
    rewards: list[float]
    file: str
    truth: Reason | None  # why an honest validator rejects it
    lies: bool  # the colluders forge figures of it


class Scene:
    """One run. The first `colluders` of the three validators follow the attack."""

    def __init__(self, folder: Path, attack: Attack, colluders: int, steps: int = STEPS) -> None:
        self.attack, self.steps = attack, steps
        self.colluders, self.honest = VALIDATORS[:colluders], VALIDATORS[colluders:]
        self.now_s, self.version, self.rounds, self.draws = 1_700_000_000.0, 0, 0, 0
        self.uploads: dict[str, Uploaded] = {}
        self.held: list[tuple[Identity, Claim]] = []
        self.told: list[str] = []  # to the operator
        self.refused = False  # the coordinator refused what a colluder sent
        self.config = parse(
            {
                "run": {"steps": steps},
                "sampling": {"max_tokens": MAX_TOKENS, "group_size": SIZE},
                "coordinator": {"prompts_per_step": 3 * GROUPS},
                "workers": {"groups_per_submission": GROUPS},
                "learner": {"optimizer_steps_per_step": 1},
            }
        )
        self.folder, self.store = folder, Folder(folder / "store")
        self.database = open_sqlite(folder / DATABASE)
        self.database.sqlite.execute("PRAGMA synchronous = OFF")
        ledger = Ledger(self.database, COORDINATOR, clock=self.clock)
        self.pool = Pool(self.database, ledger, self.config, RUN, self.clock, secret=b"secret")
        self.pool.checkers.random, self.pool.checkers.notify = self.draw, self.told.append
        record_start(self.pool.db, RUN, COORDINATOR.public, self.config)
        for name, key in NAMES.items():
            role: Any = "validator" if key in VALIDATORS else "worker" if key in WORKERS else name
            invite = InvitePayload(run=RUN, role=role, name=name, nonce=key.public[:32], expires_s=2_000_000_000)
            self.pool.members.register(key.public, invite, None)
        self.gathering = Gathering(self.accepted_file, run=RUN, config=self.config, quarantine=folder / "quarantine")
        self.trained_on: set[str] = set()  # submissions
        self.publish(0)

    def accepted_file(self, id: str) -> bytes:
        return self.store.get("accepted", self.pool.judgement.hashes(id)[1])

    def clock(self) -> float:
        return self.now_s

    def draw(self) -> float:
        self.draws += 1
        return 1.0 if self.draws % DRAWN else 0.0

    def publish(self, version: int) -> None:
        self.version = version
        self.pool.learning.published(PolicyVersion(version=version, digest=f"{version:064x}", size_bytes=1))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run until the last step is trained and no work waits, or `until`, or MAX_ROUNDS rounds have passed."""
        trained = 0
        while self.rounds < max(MAX_ROUNDS, self.steps) and not until():
            self.rounds += 1
            self.now_s += ROUND_S
            for key in VALIDATORS:
                self.beat(key, wants=False)
            for number in range(len(WORKERS)):
                self.upload(WORKERS[(self.rounds + number) % len(WORKERS)])
            for _ in range(3):  # opinions on one submission
                turn = self.rounds % max(len(self.colluders), 1)
                for key in (*self.colluders[turn:], *self.colluders[:turn], *self.honest):
                    self.judge_all(key)
            self.answer_held()
            for step in range(trained, self.pool.db.open_step()):
                self.train(step)
                trained = step + 1
            if trained == self.steps and not {"uploaded", "validating"} & {self.state(id) for id in self.uploads}:
                return

    def train(self, step: int) -> None:
        """Read the step's files as the learner does, sign what it would train on, and publish the next version."""
        fetched = self.gathering.gather(self.pool.batches.of_step(step), {key.public for key in VALIDATORS})
        self.trained_on |= {group.submission for group in fetched.groups}
        record = StepRecord(
            run=RUN,
            step=step,
            groups=[BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups],
            files={group.submission: fetched.contents[group.submission] for group in fetched.groups},
            before=f"{step:064x}",
            after=f"{step + 1:064x}",
            computed=Computed(dtype="float32", threads=1, ranks=1, torch="", machine=""),
        )
        signed = Signed.make(LEARNER, record.model_dump_json(), domain=DOMAIN).model_dump_json()
        names = sorted(record.files)
        self.pool.learning.trained(StepReport(step=step, metrics={}, trained=names, record=signed))
        self.publish(step + 1)

    @property
    def is_warming_up(self) -> bool:
        return self.attack.when == "late" and self.rounds <= WARM_UP

    def submission(self, id: str) -> Submission:
        submission = self.pool.db.submissions.get(id)
        assert submission is not None
        return submission

    def state(self, id: str) -> str:
        return self.submission(id).state

    # --- workers -----------------------------------------------------------------------------------------------------

    def fingerprint(self, key: Identity) -> str:
        """Return this node's fingerprint: that of the class which the attack names, or one of its own."""
        named = self.attack.in_class
        inside = key in self.colluders or key in named
        return "1" * 64 if named and inside else key.public

    def beat(self, key: Identity, *, wants: bool) -> Assignment | None:
        fingerprint = Fingerprint(version=self.version, value=self.fingerprint(key))
        renewals = self.pool.members.checkers.renewals(key.public)
        beat = Heartbeat(policy_version=self.version, wants_task=wants, fingerprint=fingerprint, renewals=renewals)
        return self.pool.members.heartbeat(key.public, beat).assignment

    def upload(self, key: Identity) -> None:
        task = self.beat(key, wants=True)
        self.now_s += 1
        if task is None:
            return
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=RUN,
            step=task.step,
            policy_version=task.policy_version,
            policy_digest=task.policy_digest,
            worker=key.public,
            submission=task.number,
            nonce=task.nonce,
            groups=task.groups,
            signer=key.public,
        )
        friend = key is FRIEND
        flat = (friend and self.attack.flat) or self.is_warming_up
        rows = [
            Rollout(
                group=number // SIZE,
                target_length=0,
                seed=number,
                tokens=[7] * TOKENS,
                logprobs=[-0.5] * TOKENS,
                proofs=[bytes(258)],
            )
            for number in range(task.groups * SIZE)
        ]
        file = self.store.put("submissions", write_submission(header, rows, key))
        truth = self.attack.truth if friend else None
        lies = key is self.attack.target and not self.is_warming_up
        rewards = [0.0 if flat else float(number % SIZE) for number in range(len(rows))]
        self.uploads[task.id] = Uploaded(header, rows, rewards, file, truth, lies)
        self.pool.assignments.uploaded(key.public, task.id, file)

    # --- validators --------------------------------------------------------------------------------------------------

    def judge_all(self, key: Identity) -> None:
        """Claim work, and judge it. An honest validator can judge only versions that relays still hold."""
        colludes = key in self.colluders
        if colludes and not self.attack.claims:
            return
        for claim in self.pool.judgement.claim(key.public, 16).claims:
            if (key, claim) in self.held:
                continue
            uploaded = self.uploads[claim.assignment.id]
            version = claim.assignment.policy_version
            if not colludes and version <= self.version - KEEP and version not in self.pool.db.kept_versions():
                continue
            last = self.pool.db.open_step() >= self.steps - 1
            if colludes and uploaded.lies and (last or self.attack.when != "at the end"):
                if self.attack.when == "at once" and self.attack.said is not None:
                    self.give(key, claim, self.attack.said)
                    continue
                self.held.append((key, claim))
            else:
                exact = claim.fingerprint == self.fingerprint(key)
                replay = Replay(tokens=TOKENS * len(uploaded.rows), mismatched=0) if exact else None
                self.give(key, claim, Said(uploaded.truth, replay))

    def answer_held(self) -> None:
        """Let the colluders answer the claims that they held until now."""
        for key, claim in list(self.held):
            gone = claim.assignment.policy_version <= self.version - KEEP
            ended = self.pool.db.is_trained(self.steps)
            due = {"late": gone or ended, "at the end": ended, "at once": False}[self.attack.when]
            if due and self.attack.said is not None:
                self.held.remove((key, claim))
                self.give(key, claim, self.attack.said)
            elif self.now_s > claim.lease_s:
                self.held.remove((key, claim))

    def give(self, key: Identity, claim: Claim, said: Said) -> None:
        """Sign an opinion, and send it."""
        id, judgement = claim.assignment.id, self.pool.judgement
        for each in (said, *(self.attack.repeats if key in self.colluders and self.uploads[id].lies else ())):
            try:
                accepted = self.accept(key, id, each) if each.reason is None else ""
                judgement.judge(key.public, self.verdict(key, id, each, accepted))
            except PoolError:
                self.refused |= key in self.colluders
                return

    def accept(self, key: Identity, id: str, said: Said) -> str:
        """Store an accepted file. Return its hash."""
        uploaded = self.uploads[id]
        if said.stores == "nothing":
            return "0" * 64
        rows = [
            AcceptedRollout(row.group, f"t{number}", [1, 2], row.tokens, row.logprobs, reward + said.reward)
            for number, (row, reward) in enumerate(zip(uploaded.rows, uploaded.rewards, strict=True))
        ]
        data = write_accepted(uploaded.header, rows, key) if said.stores == "its file" else f"garbage {id}".encode()
        accepted = self.store.put("accepted", data)
        self.pool.judgement.accepted_stored(key.public, id, accepted)
        return accepted

    def verdict(self, key: Identity, id: str, said: Said, accepted: str) -> Verdict:
        uploaded = self.uploads[id]
        differ = len(set(uploaded.rewards[:SIZE])) > 1
        useful = differ if said.useful is None else said.useful
        group = GroupResult(reward_mean=0.5, useful=useful, tokens=said.tokens)
        groups = [] if said.reason else [group] * min(said.groups, uploaded.header.groups)
        opinion = Opinion(
            run=RUN,
            submission=f"{id[:-6]}999999" if said.about == "submission" else id,
            file="0" * 64 if said.about == "file" else uploaded.file,
            reason=said.reason,
            tokens=sum(each.tokens for each in groups),
            accepted=accepted,
            replay=said.replay,
            spent=None if said.reason else said.spent,
        )
        signed = sign_opinion(opinion, key).model_dump_json()
        return Verdict(submission=id, opinion=signed, detail="", evidence={}, groups=groups)

    # --- what came of it ---------------------------------------------------------------------------------------------

    def cell(self) -> Cell:
        """Return what came of the attack, and close the pool."""
        forged = {id for id in self.uploads if self.is_forged(id)}
        outvoted = [f"{name} must reload" for name, key in NAMES.items() if key in self.colluders]
        finders = {
            "coordinator": self.refused,
            "second opinion": any(line.startswith(tuple(outvoted)) for line in self.told),
            "recomputation": any(self.is_contradicted(id) for id in self.uploads),
        }
        honest = max((self.harm(key) for key in (ALICE, BOB)), key=HARMS.index)
        friend = self.gain() if self.attack.target is FRIEND else ""
        finders["audit"] = self.audit()
        return Cell(
            honest,
            friend,
            bool(forged & self.trained_on),
            self.rounds > 3 * self.steps,
            tuple(name for name in finders if finders[name]),
        )

    def harm(self, key: Identity) -> str:
        """Return the worst that happened to an honest worker."""
        node = self.pool.db.nodes.get(key.public)
        assert node is not None
        if node.state in ("banned", "dismissed"):
            return {"banned": "slashed", "dismissed": "dismissed"}[node.state]
        if node.suspensions:
            return "suspended"
        own = [id for id, uploaded in self.uploads.items() if uploaded.header.worker == key.public]
        states = [self.state(id) for id in own]
        if {"rejected", "expired"} & set(states):
            return "unpaid"
        if {"uploaded", "validating"} & set(states):
            return "waits"
        return "paid" if self.tokens(key) == TOKENS * sum(len(self.uploads[id].rows) for id in own) else "paid less"

    def gain(self) -> str:
        """Return what the friend got."""
        node = self.pool.db.nodes.get(FRIEND.public)
        assert node is not None
        if node.state in ("banned", "dismissed"):
            return {"banned": "slashed", "dismissed": "dismissed"}[node.state]
        own = [uploaded for uploaded in self.uploads.values() if uploaded.header.worker == FRIEND.public]
        earned = TOKENS * sum(len(uploaded.rows) for uploaded in own if uploaded.truth is None)
        return "enriched" if self.tokens(FRIEND) > earned else "not enriched"

    def tokens(self, key: Identity) -> int:
        escrow = self.pool.judgement.escrow.tokens_by_credit()
        return sum(escrow.get((key.public, credit), 0) for credit in ("credited", "pending"))

    def is_forged(self, id: str) -> bool:
        """Return whether the accepted file is a lie of the worker, or of a colluder whose opinion stands."""
        stands = self.submission(id).validator in [key.public for key in self.colluders]
        uploaded = self.uploads[id]
        return uploaded.lies and self.attack.forges and (uploaded.truth is not None or stands)

    def is_contradicted(self, id: str) -> bool:
        """Return whether an audit that judges this file again, with the run's weights, contradicts the ledger."""
        uploaded, said, state = self.uploads[id], self.attack.said, self.state(id)
        if state == "rejected":
            reason = self.database.value("SELECT reason FROM submissions WHERE id = ?", id)
            return uploaded.truth is None and reason in HARD
        false = uploaded.truth is not None or (said is not None and bool(said.reward))
        return state == "accepted" and false and self.is_forged(id)

    def audit(self) -> bool:
        """Return whether the audit of ledger and files finds a broken link."""
        record = RunRecord(self.folder, lambda line: None)
        record.add_history(self.pool.db.history.after(0))
        record.close()
        (self.folder / "config.toml").write_text(dumps(self.config))
        seal(self.pool.db, TABLE_NAMES)
        self.database.sqlite.close()
        try:
            audit(self.folder, lambda line: None, Random(0), rerun=0, proofs=0)
        except BrokenError:
            return True
        return False
