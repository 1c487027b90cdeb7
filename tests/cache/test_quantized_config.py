"""The settings of quantised caches: kept in files, refused before any pass where they can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.small_packing import HEADS, WIDTH, configure
from tests.conformance.cases import load_model

import unspool
from unspool.cache import HQQQuantizedCache, QuantizedCache, QuantizedCacheConfig, QuantoQuantizedCache
from unspool.errors import SettingError, UnspoolError


def test_config_round_trip(tmp_path: Any) -> None:
    config = QuantizedCacheConfig("HQQ", nbits=8, axis_value=1, compute_dtype=torch.bfloat16)
    assert QuantizedCacheConfig.from_dict(config.to_dict()) == config
    assert config.update(nbits=2, colour="red") == {"colour": "red"} and config.nbits == 2
    config.to_json_file(tmp_path / "c.json")
    assert '"compute_dtype": "torch.bfloat16"' in (tmp_path / "c.json").read_text()
    assert QuantizedCacheConfig(compute_dtype="torch.bfloat16").compute_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nbits": 3}, "`nbits`=3 can't be packed"),
        ({"nbits": 8, "backend": "quanto"}, "optimum-quanto.*takes 2 or 4; backend='unspool' packs 8"),
        ({"nbits": 1, "backend": "HQQ"}, "hqq.*takes 2 or 4 or 8"),
        ({"nbits": True}, "`nbits`=True"),
        ({"axis_key": -1, "backend": "HQQ"}, "`axis_key`=-1 is no axis of backend='HQQ', which takes 0 or 1"),
        ({"axis_value": 1, "backend": "quanto"}, "`axis_value`=1 is no axis"),
        ({"axis_key": 2}, "`axis_key`=2"),
        ({"backend": "bits"}, "`backend`='bits' is none of 'unspool', 'quanto', 'HQQ'"),
        ({"backend": 4}, "`backend`=4"),
        ({"q_group_size": 0}, "`q_group_size` must be a whole number from 1"),
        ({"q_group_size": 10**9}, "`q_group_size`"),
        ({"residual_length": -1}, "`residual_length`"),
        ({"residual_length": 1.5}, "`residual_length`"),
        ({"residual_length": float("nan")}, "`residual_length`"),
        ({"compute_dtype": "int8"}, "`compute_dtype` must be one of float16"),
        ({"device": "toaster"}, "`device`='toaster' is no device"),
        ({"group_size": 64}, "'group_size'.*did you mean 'q_group_size'"),
    ],
)
@pytest.mark.parametrize("kind", ["quantized", "quantized_static", "quantized_hybrid", "offloaded_quantized_hybrid"])
def test_bad_settings_are_refused_before_the_first_pass(
    kind: str, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("llama").model
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("a pass was made"))
    with pytest.raises(UnspoolError, match=message):
        unspool.generate(
            model, torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation=kind, cache_config=values
        )


def test_a_cache_for_another_device_is_refused() -> None:
    cache = QuantizedCache(configure(device="meta"))
    cache.begin(1, 1)
    with pytest.raises(SettingError, match="made for device='meta' and the keys are on cpu"):
        cache.write(0, torch.zeros(1, 1, 2, HEADS, WIDTH))


def test_defaults_are_kivi() -> None:
    model = load_model("llama").model
    cache = model.new_cache("quantized", 1, 10)
    assert type(cache) is QuantizedCache
    keys, values = cache.cache_config.make_schemes(16)
    assert (keys.by_channel, values.by_channel, keys.nbits, keys.block) == (True, False, 4, 64)
    for backend, kind in (("quanto", QuantoQuantizedCache), ("HQQ", HQQQuantizedCache)):
        assert type(model.new_cache("quantized", config={"backend": backend})) is kind
