"""The rollout browser on a run that keeps its files in a bucket."""

from pathlib import Path

import pytest

from shoal.config.sections import StoreSection
from shoal.dashboard.rollouts import Rollouts
from shoal.dashboard.watched import WatchedFolder
from shoal.store.folder import StoreError
from tests.servers import S3_KEY, S3_SECRET, s3_server

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")


def test_a_group_is_shown_from_the_bucket(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedFolder(finished)
    assert run.folder and run.config and run.queries
    here = Rollouts(run.folder, run.coordinator, run.config, run.queries)
    with s3_server("moto") as url:
        store = StoreSection(url="s3://pool/run", endpoint=url)
        config = run.config.model_copy(update={"store": store})
        there = Rollouts(run.folder, run.coordinator, config, run.queries)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
            there.group(1, 0)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
        with pytest.raises(StoreError, match="is not in s3://pool/run/"):
            there.group(1, 0)
        for kind in ("submissions", "accepted"):
            for path in (run.coordinator / "store" / kind).rglob("*.parquet"):
                there.store.put(kind, path.read_bytes())
        assert there.group(1, 0) == here.group(1, 0)
    run.close()
