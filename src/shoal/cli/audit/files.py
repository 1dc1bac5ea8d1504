"""Check the files in a run's folder that a member signed or named by digest, except those that `walk` reads.

    coordinator/store     each file's name is its hash; every upload in the sealed table exists
    coordinator/tasks     each file's name is its hash; the config's manifest and every file that it lists exist
    origin/store          manifests have the origin's signature and the digests in the ledger; every shard matches
    learner/versions      weights match the learner's record, and complete folders match their manifests
    learner/model         the last version, with any adapters merged
    learner/checkpoints   files match the learner's signature
    config.toml, metrics.jsonl, evaluations.jsonl    match the ledger and the sealed history

Invariant: every file in these places is checked completely. A run deletes its older versions and checkpoints, so those may
be missing, but the newest ones of a finished run must exist.
Left out: caches of other nodes, logs, pictures and the summary, on which nothing depends.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError

from shoal.cli.audit.pay import AuditState
from shoal.cli.audit.run import AuditedRun, BrokenError, checking, read_config
from shoal.coordinator.database import HistoryTable as History
from shoal.coordinator.database import Kind, config_text
from shoal.coordinator.submissions import Submissions
from shoal.files import file_digest
from shoal.learner.report import CHECKPOINT, SIGNED
from shoal.protocol.identity import Signed
from shoal.protocol.messages import CheckpointRecord
from shoal.shardcast.files import StreamFiles
from shoal.shardcast.manifest import Manifest, parse_version, version_name
from shoal.shardcast.store import ShardStore
from shoal.store.folder import HASH, Folder
from shoal.tasks.taskset import TaskManifest

WEIGHTS = "model.safetensors"


def check_files(run: AuditedRun, state: AuditState) -> list[str]:
    """Check the places listed at the top of this file. Return a line for each that exists. Raise BrokenError."""
    manifests = _origin(run, state)
    origin = f"origin: every manifest and shard of {len(manifests)} versions"
    lines = [_store(run), _tasks(run), origin, *_versions(run, state, manifests), *_checkpoints(run, state)]
    return [line for line in [*lines, *_records(run)] if line]


# --- the coordinator's files -----------------------------------------------------------------------------------------


def _store(run: AuditedRun) -> str:
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
    return f"store: {len(files) if folder else named} files"


def _tasks(run: AuditedRun) -> str:
    folder, digest = run.coordinator / "tasks", run.config.tasks.digest
    if not digest:
        return ""
    with checking(f"task file {digest[:16]}"):
        manifest = TaskManifest.decode((folder / digest).read_bytes())
    chunks = [chunk for source in manifest.sources for chunk in source.chunks] + manifest.heldout
    names = {digest, *(chunk.sha256 for chunk in chunks), *manifest.files.values()}
    names |= {path.name for path in folder.iterdir() if HASH.fullmatch(path.name)}
    for name in sorted(names):
        with checking(f"task file {name[:16]}"), (folder / name).open("rb") as file:
            if sha256(file.read()).hexdigest() != name:
                raise BrokenError(f"task file {name[:16]}", "its content does not match its name")
    return f"tasks: {len(names)} files"


def _records(run: AuditedRun) -> list[str]:
    """Check the config and the metrics beside the coordinator's folder."""
    path = run.folder / "config.toml"
    if (
        path.is_file() or run.folder != run.coordinator
    ):  # `shoal run` writes it; a coordinator's own folder may have none
        with checking(path.name):
            if config_text(read_config(path.read_text(), path.name)) != config_text(run.config):
                raise BrokenError(path.name, "differs from the config in the ledger")
    if run.connection is None or run.chain[-1].kind != "sealed":
        return []
    figures: list[tuple[str, Kind, Callable[[str], str]]] = [
        ("metrics.jsonl", "step", _metrics),
        ("evaluations.jsonl", "evaluation", str),
    ]
    folders = [run.folder, run.coordinator]
    if run.coordinator.resolve().name == "coordinator":
        folders.append(run.coordinator.resolve().parent)  # `shoal run` writes them there
    for name, kind, line in figures:
        found_at = next((folder / name for folder in folders if (folder / name).is_file()), None)
        rows = [line(body) for body in History(run.connection).bodies(kind)]
        if found_at is None:
            if rows:
                raise BrokenError(name, "missing")
            continue
        with checking(name):
            if sorted(found_at.read_text().removesuffix("\n").split("\n")) != sorted(rows or [""]):
                raise BrokenError(name, "differs from the history in the database")
    return ["config.toml, metrics.jsonl, evaluations.jsonl: as recorded"]


def _metrics(body: str) -> str:
    """Return a line as the coordinator writes it, with all values as floats."""
    return json.dumps({name: float(value) for name, value in json.loads(body).items()})


# --- weights ---------------------------------------------------------------------------------------------------------


def _origin(run: AuditedRun, state: AuditState) -> dict[int, Manifest]:
    """Return the verified manifests by version."""
    root = run.folder / "origin" / "store"
    if not root.is_dir():
        return {}
    store = ShardStore(root)
    with checking("origin/store/versions.json"):
        listed = store.versions()
    versions = {version for path in root.iterdir() if (version := parse_version(path.name)) is not None}
    if versions - set(listed):
        raise BrokenError("origin/store/versions.json", f"does not list version {max(versions - set(listed))}")
    newest = max(state.policies, default=None)
    if newest is not None and newest not in versions:
        raise BrokenError(f"origin/store/v{newest:06d}", "missing, though it is the newest published version")
    manifests = {}
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
        manifests[version] = manifest
    return manifests


def _versions(run: AuditedRun, state: AuditState, manifests: dict[int, Manifest]) -> list[str]:
    root = run.folder / "learner"
    if not root.is_dir():
        return []
    folders = [
        (version, path) for path in root.glob("versions/v*") if (version := parse_version(path.name)) is not None
    ]
    models: list[Path] = []
    if len(state.records) == run.config.run.steps:
        models = [path for path in (root / "model", run.folder / "model") if path.is_dir()]
        if not models:
            raise BrokenError("model", "missing, although a finished run keeps it")
        if run.config.learner.lora is None:
            folders += [(run.config.run.steps, path) for path in models]
    digests = {record.step + 1: record.after for record in state.records}
    if state.records:
        digests[0] = state.records[0].before
    for version, folder in sorted(folders):
        link = f"{folder.relative_to(run.folder)}"
        with checking(link):
            if version in digests and file_digest(folder / WEIGHTS) != digests[version]:
                raise BrokenError(link, "not the weights that the learner recorded")
            manifest = manifests.get(version)
            if manifest is not None and not StreamFiles(folder, manifest.files).match(manifest.content):
                raise BrokenError(link, "not the files that the origin published")
    if run.config.learner.lora is not None:
        for path in models:
            _check_merged(root / "versions" / version_name(run.config.run.steps), path, run)
    return [f"learner: weights of {len(folders)} versions"]


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


def _checkpoints(run: AuditedRun, state: AuditState) -> list[str]:
    root = run.folder / "learner" / "checkpoints"
    folders = sorted(root.glob("step-*")) if root.is_dir() else []
    steps = run.config.run.steps
    if len(state.records) == steps and (run.folder / "learner").is_dir() and not (root / f"step-{steps:06d}").is_dir():
        raise BrokenError(f"learner/checkpoints/step-{steps:06d}", "missing, although a finished run keeps it")
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
    return [f"learner: {len(folders)} checkpoints"]
