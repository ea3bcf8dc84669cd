"""Triton releases as data: which engine versions they hold, and which config fields they take."""

from __future__ import annotations

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.engines.trtllm.versions import known_lines, version_line
from pipeline.triton import releases

R1 = ("+hw=b200", "model=deepseek_r1")


def test_every_entry_is_complete_and_in_order():
    tags = [release.tag for release in releases.releases()]
    servers = [tuple(map(int, release.server.split("."))) for release in releases.releases()]
    assert tags == sorted(tags) and servers == sorted(servers) and len(set(servers)) == len(servers)
    for release in releases.releases():
        assert release.images, release.tag
        for image in release.images.values():
            assert image.container.startswith(f"tritonserver:{release.tag}-")
            assert all(part.count(".") >= 1 for part in (image.version, image.python, image.cuda, image.driver)), image


@pytest.mark.parametrize("line", known_lines())
def test_version_lines_name_the_containers_that_hold_them(line):
    assert list(version_line(line).triton_containers) == [release.tag for release in releases.holding("trtllm", line)]


@pytest.mark.parametrize(
    ("version", "wanted", "tag"),
    [
        ("1.2", "null", "26.07"), ("1.1", "null", "26.02"),
        ("1.2", "26.03", "26.03"), ("1.2.1", "26.05", "26.05"), ("1.0", "25.10", "25.10"),
    ],
)
def test_the_target_is_the_newest_that_holds_the_engine_or_the_one_asked_for(version, wanted, tag):
    config = load([*R1, f"engine.trtllm.version='{version}'", f"serve.triton={wanted}"])
    found = releases.target(config)
    assert found is not None and found.tag == tag
    assert found.images["trtllm"].holds(version)


def test_a_line_without_a_container_has_no_target_and_the_embedded_engine_the_oldest():
    assert releases.target(load([*R1, "engine.trtllm.version='1.3'"])) is None
    assert releases.target(load(["+hw=cpu"])) == releases.releases()[0]


@pytest.mark.parametrize(
    ("version", "wanted", "says"),
    [
        ("1.2", "25.12", r"serve\.triton=25\.12 holds trtllm 1\.1\.0, but engine\.trtllm\.version=1\.2: .* 26\.03, 26\.04"),
        ("1.2.1", "26.03", r"holds trtllm 1\.2\.0, but engine\.trtllm\.version=1\.2\.1: .* 26\.04"),
        ("1.2", "26.08", r"serve\.triton=26\.08 has no trtllm container"),
        ("1.3", "26.07", r"no release holds 1\.3 yet"),
        ("1.2", "27.01", r"serve\.triton=27\.01 is not a known release of Triton: choose one of 24\.10"),
    ],
)
def test_a_container_that_lacks_the_engine_is_refused(version, wanted, says):
    with pytest.raises(ConfigError, match=says):
        releases.target(load([*R1, f"engine.trtllm.version='{version}'", f"serve.triton='{wanted}'"]))


def test_fields_that_came_later_are_found_by_path():
    config = pb.ModelConfig(name="m")
    config.ensemble_scheduling.max_inflight_requests = 4
    config.model_metrics.metric_control.add()
    assert releases.refused_fields(config, "24.10") == ["ensemble_scheduling.max_inflight_requests", "model_metrics"]
    assert releases.refused_fields(config, "25.09") == ["ensemble_scheduling.max_inflight_requests"]
    assert releases.refused_fields(config, "25.12") == []
