"""The rollout browser on a run that keeps its files in a bucket."""

from pathlib import Path

import pytest

from shoal.config.sections import StoreSection
from shoal.store.folder import StoreError
from shoal.watch.page.rollouts import Rollouts
from shoal.watch.run import FolderRun
from tests.servers import S3_KEY, S3_SECRET, s3_server

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")


def test_a_group_is_shown_from_the_bucket(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FolderRun(finished)
    assert run.config
    here, there = Rollouts(run), Rollouts(run)
    with s3_server("moto") as url:
        store = StoreSection(url="s3://pool/run", endpoint=url)
        there.config = run.config.model_copy(update={"store": store})
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
            there.group(1, 0)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
        with pytest.raises(StoreError, match="is not in s3://pool/run/"):
            there.group(1, 0)
        for kind in ("submissions", "accepted"):
            for path in (finished / "coordinator" / "store" / kind).rglob("*.parquet"):
                there.store.put(kind, path.read_bytes())
        assert there.group(1, 0) == here.group(1, 0)
