"""What must be equal at all sites, by name."""

import json
import shutil
from pathlib import Path

import pytest

from shoal.diloco.about import about_model, compare
from shoal.diloco.messages import MeetingError


@pytest.mark.parametrize(("file", "what"), [("config.json", "model"), ("tokenizer.json", "tokenizer")])
def test_a_site_with_another_model_or_tokenizer_is_told_which(
    file: str, what: str, tiny_folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    compare("site-1", about_model(other), about_model(tiny_folder))
    held = json.loads((other / file).read_text())
    (other / file).write_text(json.dumps(held | {"version": "another"}))
    with pytest.raises(MeetingError, match=f"site-1 has another {what}: .* give every site the same {what}$"):
        compare("site-1", about_model(other) | {"data": "x"}, about_model(tiny_folder) | {"data": "y"})
