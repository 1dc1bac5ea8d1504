"""The reply file, which anyone with the same weights can recompute: prompt, seed, tokens, TOPLOC proofs.

    build    a finished generation -> a Reply, which is one JSON file
    verify   a Reply and a loaded model -> a ReplyVerdict with one finding per question

Verification shows that these weights, this prompt and this seed yield the reply. It does not show whether the text is
true, whether the server chose among several seeds, or whether the run published these weights under this version.
To check against weights that you trust, name them with `shoal audit --model`.
Invariant: nothing in a Reply is trusted; its contents are recomputed from messages, seed and weights. The file names the
exactness class of the machine that made it. In the same class, every bit must be equal. In another class, tokens and
proofs must be within the validator's limits, in logits, so that a high temperature does not widen them. A validator
allows a few mismatches in a submission of thousands of tokens. A reply gets only as many as chance explains: none in a
text of up to 502 tokens.
A file is read strictly: no repeated keys, no other types, no characters in the model's name that could mislead a reader.
Left out: a signature, so a reply file does not show who served it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic needs this TypedDict on Python 3.11

from shoal import toploc
from shoal.config import Config
from shoal.config.section import GreedyOrWarm
from shoal.errors import first_problem
from shoal.files import unique_json
from shoal.model import logprobs
from shoal.model.sampling import choose, replay_margins
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.serve.detokenizer import MAX_STOP_CHARACTERS, MAX_STOPS, Detokenizer, Finish, detokenize
from shoal.serve.errors import ClientGoneError, PromptError, ReplyError
from shoal.serve.generation import Generation
from shoal.serve.prompt import encode
from shoal.serve.versions import LoadedModel
from shoal.shardcast.manifest import MAX_VERSION
from shoal.validator.rounding import chance_mismatches, of_margins, of_proofs
from shoal.watch.page.guard import json_size_error

CHUNK_TOKENS = 32
MAX_BYTES = 16 << 20
MAX_TOKENS = 1 << 20
FORMAT: Literal["shoal-reply/2"] = "shoal-reply/2"
TAIL = 0.01  # share of honest replies of another class that may have more mismatches than are allowed
VOCABULARY_ROWS = 256  # tokens whose logits are in memory at once
CAVEAT = "that does not show who chose the seed, or whether the text is true."
EXACT = f"These weights, this prompt and this seed give exactly this text; {CAVEAT}"
CLOSE = f"These weights, this prompt and this seed give this text, up to differences in rounding; {CAVEAT}"
REFUSED = "This is not what these weights, this prompt and this seed give."

ENDINGS = {
    "stop": "the model ended it",
    "length": "it was cut at its limit of {limit} tokens",
    "cancelled": "it was stopped before its end",
}

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# Without `fail_fast` a list of a million wrong values produces a million errors.
Tokens = Annotated[tuple[Token, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class ReplyMessage(TypedDict):
    """A message as passed to the chat template."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["system", "user", "assistant"]
    content: str


class Reply(BaseModel):
    """The contents of a reply file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    format: Literal["shoal-reply/2"] = FORMAT
    model: Annotated[str, Field(max_length=300, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]  # nothing that misleads a reader
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None
    weights: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # BLAKE3 of the version's files
    fingerprint: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # exactness class of the server; "": none
    messages: tuple[ReplyMessage, ...] = Field(max_length=10_000, fail_fast=True)
    tools: tuple[()] = ()  # always empty; part of the format
    prompt: Tokens
    seed: Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,18})$")]  # text, because browsers round large numbers
    temperature: Annotated[float, GreedyOrWarm, Field(ge=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stops: tuple[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)], ...] = Field(default=(), max_length=MAX_STOPS)
    tokens: Tokens
    finish: Finish
    text: str
    proofs: tuple[Annotated[str, Field(max_length=400)], ...] = Field(
        max_length=MAX_TOKENS // CHUNK_TOKENS, fail_fast=True
    )

    @classmethod
    def read(cls, data: bytes) -> "Reply":
        """Parse a reply file. Raise ReplyError."""
        if len(data) > MAX_BYTES:
            raise ReplyError(f"the file has {len(data)} bytes; a reply has at most {MAX_BYTES}")
        if fault := json_size_error(data):
            raise ReplyError(f"this is not a reply file: {fault}")
        try:
            fields = unique_json(data)
            if isinstance(fields, dict) and fields.get("format") == "shoal-reply/1":
                raise ReplyError(f"the reply has the older format shoal-reply/1, and this version reads {FORMAT}")
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ReplyError(f"this is not a reply file: {first_problem(error)}") from error
        except ValueError as error:
            raise ReplyError(f"this is not a reply file: {error}") from error


@dataclass(frozen=True)
class ReplyFinding:
    question: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class ReplyVerdict:
    findings: tuple[ReplyFinding, ...]
    exact: bool  # all recomputed values are bitwise equal
    ending: str = ""  # why the text ends, as recomputed
    worst: str = ""  # the token that is furthest from the one that the seed yields; "": all are equal

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def sentence(self) -> str:
        """Summarize the verdict and its limits."""
        worst = f" At worst, {self.worst}." if self.worst else ""
        if not self.passed:
            return f"{REFUSED}{worst}"
        return f"{EXACT if self.exact else CLOSE}{worst} How it ends: {self.ending}."

    def lines(self) -> list[str]:
        lines = [
            f"{'yes' if f.passed else 'NO '}  {f.question}{f': {f.detail}' if f.detail else ''}" for f in self.findings
        ]
        return [*lines, f"{'verified' if self.passed else 'refused'}: {self.sentence}"]


def build(generation: Generation, finish: str, text: str, messages: Sequence[Any]) -> Reply:
    """Build the reply file of a finished generation that kept its hidden states. Raise ReplyError."""
    request, loaded = generation.request, generation.loaded
    if not generation.states:
        raise ReplyError("nothing was generated, so there is nothing to prove")
    hidden_TH = torch.stack(generation.states)
    try:
        proofs = toploc.build(hidden_TH, chunk_tokens=CHUNK_TOKENS)
    except (toploc.ProofError, ValueError) as error:
        raise ReplyError(f"no proof can be made of this model's states: {error}") from error
    return Reply(
        model=loaded.id,
        version=loaded.offer.version,
        weights=loaded.digest,
        fingerprint=loaded.fingerprint,
        messages=tuple(messages),
        prompt=request.prompt,
        seed=str(request.seed),
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        stops=request.stops,
        tokens=tuple(generation.tokens),
        finish=finish,  # type: ignore[arg-type]  # pydantic checks it
        text=text,
        proofs=tuple(map(toploc.to_base64, proofs)),
    )


def verify(
    reply: Reply, loaded: LoadedModel, config: Config | None = None, client_left: Callable[[], bool] = lambda: False
) -> ReplyVerdict:
    """Recompute the whole reply with a forward pass over prompt and reply. Do not call this in the event loop.

    The limits are those of `config`, the run's config. `client_left` is polled; if it is true, raise ClientGoneError.
    """

    def check() -> None:
        if client_left():
            raise ClientGoneError("the client disconnected before the verdict")

    cheap = [_check_weights(reply, loaded), _check_bounds(reply, loaded)]
    if not all(finding.passed for finding in cheap):
        return ReplyVerdict(tuple(cheap), exact=False)
    check()
    cheap.append(_check_prompt(reply, loaded))
    text, ending = _check_text(reply, loaded, check)
    cheap += [text, ending]
    if not all(finding.passed for finding in cheap):  # already refused: skip the forward pass
        return ReplyVerdict(tuple(cheap), exact=False)
    tokens, proofs, exact, worst = _check_tokens(reply, loaded, config or Config(), check)
    findings = [*cheap, tokens, proofs]
    if reply.fingerprint and reply.fingerprint == loaded.fingerprint:
        detail = "" if exact else "the file was made in this machine's exactness class, and some bits differ"
        findings.append(ReplyFinding("Is every bit equal, as within one exactness class?", exact, detail))
    return ReplyVerdict(tuple(findings), exact, ending.detail, worst)


def _check_weights(reply: Reply, loaded: LoadedModel) -> ReplyFinding:
    own, detail = loaded.offer.version, ""
    if reply.weights != loaded.digest:
        detail = f"the file names {reply.weights[:16]}, this machine has {loaded.digest[:16]}"
    elif own is not None and reply.version != own:
        detail = f"the file names version {reply.version}, and these weights are version {own}"
    return ReplyFinding("Are these the weights that the file names?", not detail, detail)


def _check_bounds(reply: Reply, loaded: LoadedModel) -> ReplyFinding:
    vocabulary = loaded.engine.model.config.vocab_size
    length = len(reply.prompt) + len(reply.tokens)
    expected = -(-len(reply.tokens) // CHUNK_TOKENS)
    detail = ""
    if length > loaded.positions:
        detail = f"{length} tokens exceed the model's {loaded.positions} positions"
    elif max(*reply.prompt, *reply.tokens) >= vocabulary or int(reply.seed) >= 1 << 63:
        detail = "a token or seed is out of range"
    elif len(reply.proofs) != expected:
        detail = f"{len(reply.proofs)} proofs for {expected} chunks"
    return ReplyFinding("Are all figures within the model's bounds?", not detail, detail)


def _check_prompt(reply: Reply, loaded: LoadedModel) -> ReplyFinding:
    try:
        same = encode(loaded, reply.messages) == reply.prompt
        detail = "" if same else "the messages give other tokens"
    except PromptError as error:
        same, detail = False, str(error)
    return ReplyFinding("Do the messages give this prompt?", same, detail)


def _check_text(reply: Reply, loaded: LoadedModel, check: Callable[[], None]) -> tuple[ReplyFinding, ReplyFinding]:
    """Decode the tokens as the server does. Compare the text, where it ends, and why it ends there."""
    decoder = Detokenizer(loaded.tokenizer, reply.stops, loaded.eos_ids, reply.max_tokens)
    same = detokenize(decoder, reply.tokens, check) == reply.text
    text = ReplyFinding("Do the tokens give this text?", same, "" if same else "the text was changed")
    finish = decoder.finish or "cancelled"
    fits = (finish, decoder.count) == (reply.finish, len(reply.tokens))
    detail = ENDINGS[finish].format(limit=reply.max_tokens)
    if decoder.stopped is not None and finish == "stop":
        detail = f"it was cut before {decoder.stopped!r}, one of its stop strings"
    if not fits:
        detail = (
            f"the file says {reply.finish!r} after {len(reply.tokens)} tokens; after {decoder.count} tokens, {detail}"
        )
    return text, ReplyFinding("Does the reply end where the file says?", fits, detail)


@torch.inference_mode()
def _check_tokens(
    reply: Reply, loaded: LoadedModel, config: Config, check: Callable[[], None]
) -> tuple[ReplyFinding, ReplyFinding, bool, str]:
    check()
    model = loaded.engine.model
    packed = pack([Tree(reply.prompt, [reply.tokens])]).to(model.device)
    hidden_NH = forward_hidden(model, packed)
    tokens_N = torch.tensor(reply.tokens, device=hidden_NH.device)
    seeds, margins = [int(reply.seed)] * len(reply.tokens), []
    for start in range(0, len(tokens_N), VOCABULARY_ROWS):
        check()
        span = slice(start, start + VOCABULARY_ROWS)
        own_C = tokens_N[span]
        scaled_CV = logprobs.logits(model, hidden_NH[span]).float() / (reply.temperature or 1.0)
        if reply.temperature == 0.0:
            margins.append(scaled_CV.amax(-1) - scaled_CV.gather(-1, own_C[:, None])[:, 0])
        else:
            positions = range(start, start + len(own_C))
            margins.append(replay_margins(scaled_CV, own_C, seeds[span], positions))
    margins_N = torch.cat(margins)
    unequal = int((margins_N != 0).sum())
    detail, worst = f"{len(margins_N) - unequal} of {len(margins_N)} are", ""
    logits_N = margins_N * (reply.temperature or 1.0)
    if unequal:
        at = int(logits_N.argmax())  # of a NaN, if there is one
        row_V = logprobs.logits(model, hidden_NH[at : at + 1])
        best = int(choose(row_V, seeds[at : at + 1], [at], reply.temperature)[0])
        own, other = loaded.text(reply.tokens[at]), loaded.text(best)
        worst = f"token {at + 1}, {own!r}, is {float(logits_N[at]):.2f} below {other!r}"
        detail = f"{detail}; {worst}"
    # The limits are in nats at the config's temperature.
    allowed = chance_mismatches(len(margins_N), TAIL)
    explained = of_margins(logits_N / config.sampling.temperature, config.validator, allowed).explained
    tokens = ReplyFinding("Are the tokens those that the seed yields?", explained, detail)
    proofs, equal = _check_proofs(reply, hidden_NH.to("cpu", torch.bfloat16), config)
    return tokens, proofs, unequal == 0 and equal, worst


def _check_proofs(reply: Reply, hidden_NH: torch.Tensor, config: Config) -> tuple[ReplyFinding, bool]:
    question = "Do the proofs match the recomputed hidden states?"
    try:
        claimed = [toploc.from_base64(proof) for proof in reply.proofs]
        chunks = toploc.verify(hidden_NH, claimed, chunk_tokens=CHUNK_TOKENS)
    except ValueError as error:  # also if the hidden states are not finite
        return ReplyFinding(question, False, f"malformed: {error}"), False
    errors = of_proofs(chunks, config.validator)
    equal = claimed == toploc.build(hidden_NH, chunk_tokens=CHUNK_TOKENS)
    return ReplyFinding(question, errors.explained, f"{len(chunks) - errors.failed} of {len(chunks)} do"), equal
