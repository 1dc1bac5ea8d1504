"""Which errors a message explains: `cli` prints these as one line; any other is a bug and keeps its traceback."""


def explained(error: Exception) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & EXPLAINED)


EXPLAINED = {
    "BatchError",
    "CalibrationError",
    "ChildError",
    "ConfigError",
    "DivergedError",
    "FetchError",
    "IdentityError",
    "InviteError",
    "LedgerError",
    "ManifestError",
    "ModelNotFoundError",
    "NodeError",
    "OSError",
    "PoolError",
    "RolloutFileError",
    "StoreError",
    "SwarmError",
    "UnsupportedModelError",
}
