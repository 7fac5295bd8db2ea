"""What a harvest sends to other processes, and what it refuses to."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import interpose as ip
from interpose.jobs.job import Job
from interpose.jobs.ray_actor import packed, unpacked
from interpose.store import harvest as harvesting
from tests.models import tiny

TEXTS = ["A zyzzyva sat on the mat", "The Eiffel Tower", "A dog"]
GIVEN: dict[str, Any] = {"site": ("resid_post", 1), "segment_texts": 1, "progress": False}


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job of a harvest that was begun and nothing was done of, of a model or of the name of one."""
    jobs: list[Job[Any]] = []
    model = "pocket" if request.param == "name" else ip.load("pocket")
    with monkeypatch.context() as patched:
        patched.setattr(harvesting, "run", lambda job, **options: jobs.append(job))
        ip.harvest(model, TEXTS, store=tmp_path / "s", engine="ray", **GIVEN)
    return jobs[0]


@pytest.mark.parametrize("job", ["name", "model"], indirect=True)
def test_a_copy_of_the_job_makes_the_same_segments(job: Any, tmp_path: Path) -> None:
    content = packed(job)
    weights = sum(one.nbytes for one in job.vectors.model.module.parameters())
    assert (len(content) > weights) == (job.name is None)  # it is loaded there
    assert b"zyzzyva" not in content  # texts come with their shards
    copy = unpacked(content, {})
    with copy.worker() as worker:
        for shard in job.shards():
            worker.make(pickle.loads(pickle.dumps(shard)))
    assert all(map(job.is_done, job.source.shards(1, {})))
    whole = ip.harvest("pocket", TEXTS, store=tmp_path / "whole", **GIVEN)
    assert ip.open_store(job.folder).manifest() == whole.manifest()


@pytest.mark.parametrize("job", ["name"], indirect=True)
def test_another_model_by_the_same_name_elsewhere_is_refused(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = packed(job)
    other = ip.load("pocket")
    other.module.get_parameter("transformer.ln_f.weight").data[0] += 1
    monkeypatch.setattr(harvesting, "load", lambda name: other)
    with pytest.raises(
        ip.FileError, match=r"'pocket' is another model on .* than where the harvest began"
    ):
        unpacked(content, {})


@pytest.mark.parametrize("job", ["model"], indirect=True)
def test_a_machine_that_does_not_see_the_folder_says_so(job: Any) -> None:
    copy = unpacked(packed(job), {})
    shutil.rmtree(job.folder)
    with pytest.raises(
        ip.FileError, match="All machines of a cluster need a folder that they share"
    ):
        copy.worker()


def test_hooks_that_others_would_not_have_or_keep_for_themselves_are_refused(
    tmp_path: Path,
) -> None:
    model = ip.wrap(tiny.build("llama"))
    assert isinstance(model, ip.TransformerModel)
    given: dict[str, Any] = {**GIVEN, "store": tmp_path / "s", "engine": "ray"}
    with pytest.raises(ip.Unsupported, match="would keep what it finds in other processes"):
        ip.harvest(model, [[3, 4]], hooks=[ip.Statistics("blocks.0.hook_resid_post")], **given)
    handle = model.register(ip.zero("mlp_out", layer=0))
    with pytest.raises(ip.Unsupported, match=r"stay in this process.*Give them as hooks="):
        ip.harvest(model, [[3, 4]], **given)
    handle.remove()


def test_weights_that_are_not_in_memory_cannot_be_sent(tmp_path: Path) -> None:
    model = ip.wrap(tiny.build("llama"))
    assert isinstance(model, ip.TransformerModel)
    len(model.sites)
    model.module.lm_head.to("meta")
    with pytest.raises(ip.Unsupported, match=r"is not in memory, so the model cannot be sent"):
        ip.harvest(model, [[3, 4]], store=tmp_path / "s", engine="ray", **GIVEN)
