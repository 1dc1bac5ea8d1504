"""Check the files in a run's folder that a member signed or named by digest, except those that `walk` reads.

    coordinator/store     each file's name is its hash; every upload in the sealed table exists
    coordinator/tasks     each file's name is its hash; the config's manifest and every file that it lists exist
    origin/store          manifests have the origin's signature and the digests in the ledger; every shard matches
    learner/versions      weights match the learner's record, and the folder's files give exactly the digest in the ledger
    model, learner/model  the last version, with any adapters merged
    learner/checkpoints   files match the learner's signature
    config.toml, metrics.jsonl, evaluations.jsonl    match the ledger and the sealed history

Invariant: every file in these places is checked completely, and what the ledger names but the folder lacks is counted as
not compared. A run deletes its older versions and checkpoints, so those may be missing, but the newest ones of a
finished run must exist.
Left out: caches of other nodes, logs, pictures and the summary, on which nothing depends.
"""

import json
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError

from shoal.cli.audit.pay import AuditState
from shoal.cli.audit.run import AuditedRun, BrokenError, checking, read_config
from shoal.coordinator.database import HistoryTable as History
from shoal.coordinator.database import config_text
from shoal.coordinator.submissions import Submissions
from shoal.files import file_digest
from shoal.learner.report import CHECKPOINT, SIGNED
from shoal.protocol.identity import Signed
from shoal.protocol.messages import CheckpointRecord
from shoal.shardcast.manifest import parse_version, version_name
from shoal.shardcast.origin import digest_of
from shoal.shardcast.store import ShardStore
from shoal.store.folder import HASH, Folder
from shoal.tasks.taskset import TaskManifest

WEIGHTS = "model.safetensors"


def check_files(run: AuditedRun, state: AuditState) -> list[str]:
    """Check the places listed at the top of this file. Return a line for each. Raise BrokenError."""
    published = _origin(run, state)
    lines = [_store(run, state), _tasks(run, state), f"origin: every manifest and shard of {len(published)} versions"]
    return [*lines, _versions(run, state, published), _checkpoints(run, state), _records(run, state)]


# --- the coordinator's files -----------------------------------------------------------------------------------------


def _store(run: AuditedRun, state: AuditState) -> str:
    """Check every file if the store is a folder; if it is a bucket, check every file that the tables name."""
    folder = run.store if isinstance(run.store, Folder) else None
    files = sorted(folder.root.glob("*/*.parquet")) if folder else []
    for path in files:
        with checking(f"store file {path.parent.name}/{path.stem[:16]}"):
            run.store.get(path.parent.name, path.stem)
    named = 0
    for id, file, accepted in Submissions(run.connection).files() if run.connection else []:
        for kind, name in (("submissions", file), ("accepted", accepted)):
            link = f"{kind.removesuffix('s')} file of {id}"
            if name is not None and folder and not folder.path(kind, name).is_file():
                raise BrokenError(link, "missing")
            if name is not None and not folder:
                named += 1
                with checking(link):
                    run.store.get(kind, name)
    state.checks.passed += (count := len(files) if folder else named)
    return f"store: {count} files"


def _tasks(run: AuditedRun, state: AuditState) -> str:
    folder, digest = run.coordinator / "tasks", run.config.tasks.digest
    if not digest:
        state.checks.unproven["task sets: the ledger names no digest of them"] += 1
        return "tasks: not compared"
    with checking(f"task file {digest[:16]}"):
        manifest = TaskManifest.decode((folder / digest).read_bytes())
    chunks = [chunk for source in manifest.sources for chunk in source.chunks] + manifest.heldout
    names = {digest, *(chunk.sha256 for chunk in chunks), *manifest.files.values()}
    names |= {path.name for path in folder.iterdir() if HASH.fullmatch(path.name)}
    for name in sorted(names):
        with checking(f"task file {name[:16]}"), (folder / name).open("rb") as file:
            if sha256(file.read()).hexdigest() != name:
                raise BrokenError(f"task file {name[:16]}", "its content does not match its name")
    state.checks.passed += len(names)
    return f"tasks: {len(names)} files"


def _records(run: AuditedRun, state: AuditState) -> str:
    """Check the config and the metrics beside the coordinator's folder."""
    checks, compared, path = state.checks, [], run.folder / "config.toml"
    if path.is_file() or run.folder != run.coordinator:  # a coordinator's own folder may have none
        with checking(path.name):
            if config_text(read_config(path.read_text(), path.name)) != config_text(run.config):
                raise BrokenError(path.name, "differs from the config in the ledger")
        compared.append(path.name)
    figures: dict[str, list[str]] = {}
    if run.connection is not None and run.chain[-1].kind == "sealed":
        history = History(run.connection)
        figures["metrics.jsonl"] = [_metrics(body) for body in history.bodies("step")]
        figures["evaluations.jsonl"] = list(history.bodies("evaluation"))
    folders = [run.folder, run.coordinator]
    if run.coordinator.resolve().name == "coordinator":
        folders.append(run.coordinator.resolve().parent)  # `shoal run` writes them there
    for name, rows in figures.items():
        found_at = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found_at is None and rows:
            raise BrokenError(name, "missing")
        with checking(name):
            text = found_at.read_text() if found_at else ""
            if sorted(text.removesuffix("\n").split("\n")) != sorted(rows or [""]):
                raise BrokenError(name, "differs from the history in the database")
        compared.append(name)
    checks.passed += len(compared)
    checks.unproven["copies of the config and the metrics: they, or sealed tables, are not here"] += 3 - len(compared)
    return f"{', '.join(compared)}: as recorded" if compared else "config.toml, metrics: not compared"


def _metrics(body: str) -> str:
    """Return a line as the coordinator writes it, with all values as floats."""
    return json.dumps({name: float(value) for name, value in json.loads(body).items()})


# --- weights ---------------------------------------------------------------------------------------------------------


def _origin(run: AuditedRun, state: AuditState) -> set[int]:
    """Return the versions whose manifest and shards are verified."""
    root = run.folder / "origin" / "store"
    if not root.is_dir():
        state.checks.unproven["versions as the origin serves them: its store is not here"] += len(state.policies)
        return set()
    store = ShardStore(root)
    with checking("origin/store/versions.json"):
        listed = store.versions()
    versions = {version for path in root.iterdir() if (version := parse_version(path.name)) is not None}
    if versions - set(listed):
        raise BrokenError("origin/store/versions.json", f"does not list version {max(versions - set(listed))}")
    newest = max(state.policies, default=None)
    if newest is not None and newest not in versions:
        raise BrokenError(f"origin/store/v{newest:06d}", "missing, though it is the newest published version")
    for version in sorted(versions):
        link = f"manifest of version {version}"
        with checking(link):
            signed = store.signed(version)
            if signed is None:
                raise BrokenError(link, "missing")
            if signed.key not in run.keys.get("origin", set()):
                raise BrokenError(link, "signed by no origin of this run")
            manifest = signed.open(signed.key, run=run.run, version=version)
            if manifest.digest != state.policies.get(version, manifest.digest):
                raise BrokenError(link, "differs from the manifest that the ledger names")
        missing = store.missing(manifest)
        if missing:
            part, shard = missing[0]
            raise BrokenError(f"shard {shard.index} ({part}) of version {version}", "missing or changed")
    state.checks.passed += len(versions)
    if gone := state.policies.keys() - versions:
        state.checks.unproven["versions as the origin serves them: it dropped them"] += len(gone)
    return versions


def _versions(run: AuditedRun, state: AuditState, published: set[int]) -> str:
    root, last = run.folder / "learner", run.config.run.steps
    named = [(parse_version(path.name), path) for path in sorted(root.glob("versions/v*"))]
    folders = [(version, path) for version, path in named if version is not None]
    models = [path for path in (root / "model", run.folder / "model") if path.exists()] if state.has_ended else []
    if state.has_ended and not models:
        if run.folder != run.coordinator and run.chain[-1].kind == "sealed":  # otherwise a kill may have been earlier
            raise BrokenError("model", "missing, although a finished run keeps it")
        state.checks.needed["trained models: it is not in this folder; copy it there as model/"] += 1
    if run.config.learner.lora is None:
        folders += [(last, path) for path in models]
    elif models:
        for path in models:
            _check_merged(root / "versions" / version_name(last), path, run)
        state.checks.passed += len(models)
        state.checks.unproven["copies of the adapters for peft: learner/adapter"] += 1
    weights = {record.step + 1: record.after for record in state.records}
    if state.records:
        weights[0] = state.records[0].before
    for version, folder in folders:
        link = str(folder.relative_to(run.folder))
        with checking(link):
            if version in weights and file_digest(folder / WEIGHTS) != weights[version]:
                raise BrokenError(link, "not the weights that the learner recorded")
            digest = state.policies.get(version)
            if next(folder.rglob(".*"), None) or digest not in (None, digest_of(folder, run.run, version)):
                raise BrokenError(link, "not exactly the files that the origin published")  # no hidden ones, either
        state.checks.passed += (version in weights) + (digest is not None)
    if models and last not in state.policies:
        state.checks.needed[f"files beside the model's weights: version {last} was not published"] += 1
    kept = {version for version, _ in folders}
    if gone := len(state.policies.keys() - kept - published) + len(weights.keys() - kept):
        state.checks.unproven["digests of versions and of their weights: their files are gone"] += gone
    return f"learner: weights of {len(folders)} versions"


def _check_merged(version: Path, model: Path, run: AuditedRun) -> None:
    """Compare a model with the last version, from which the learner merged it."""
    from shoal.learner.masters import difference_from_merge  # imports torch

    link = str(model.relative_to(run.folder))
    if not version.is_dir():
        raise BrokenError(str(version.relative_to(run.folder)), f"missing, although {link} was merged from it")
    with checking(link):
        try:
            name = difference_from_merge(version, model)
        except SafetensorError as error:
            raise BrokenError(link, error) from error
        if name:
            raise BrokenError(link, f"{name} is not what merging the last version's adapters gives")


def _checkpoints(run: AuditedRun, state: AuditState) -> str:
    root = run.folder / "learner" / "checkpoints"
    folders = sorted(root.glob("step-*")) if root.is_dir() else []
    steps = run.config.run.steps
    if state.has_ended and not (root / f"step-{steps:06d}").is_dir():
        if (run.folder / "learner").is_dir() and run.chain[-1].kind == "sealed":
            raise BrokenError(f"learner/checkpoints/step-{steps:06d}", "missing, although a finished run keeps it")
        state.checks.unproven["checkpoints: the last one is not here"] += 1
    for folder in folders:
        link = str(folder.relative_to(run.folder))
        with checking(link):
            signed = Signed.model_validate_json((folder / SIGNED).read_bytes())
            if signed.key not in run.keys.get("learner", set()):
                raise BrokenError(link, "signed by no learner of this run")
            record = CheckpointRecord.model_validate_json(signed.open(signed.key, domain=CHECKPOINT))
            if (record.run, record.step) != (run.run, int(folder.name.removeprefix("step-"))):
                raise BrokenError(link, f"holds the state after {record.step} steps of {record.run}")
            digests = {path.name: file_digest(path) for path in folder.iterdir() if path.name != SIGNED}
            changed = [name for name in record.files | digests if digests.get(name) != record.files.get(name)]
            if changed:
                raise BrokenError(f"{link}/{changed[0]}", "differs from the file that the learner signed")
    state.checks.passed += len(folders)
    return f"learner: {len(folders)} checkpoints"
