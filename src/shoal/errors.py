"""Which errors a message explains: `cli` prints these as one line; any other is a bug and keeps its traceback."""


def explained(error: Exception) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & EXPLAINED)


EXPLAINED = {
    "BatchError",
    "CalibrationError",
    "ChildError",
    "ConfigError",
    "ConversationError",
    "DivergedError",
    "FetchError",
    "IdentityError",
    "InviteError",
    "LedgerError",
    "ManifestError",
    "MissingPeftError",
    "ModelNotFoundError",
    "NodeError",
    "OSError",
    "OutOfMemoryError",
    "PlotError",
    "PoolError",
    "RolloutFileError",
    "StoppedError",
    "StoreError",
    "SwarmError",
    "TasksNotFoundError",
    "TrackerError",
    "UnsupportedModelError",
}
