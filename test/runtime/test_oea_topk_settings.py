"""oea-topk: what its environment variables may say, and how a bad one is told."""

from __future__ import annotations

import pytest

from sglang_patches.runtime.oea_topk.settings import BadSetting, Rule, read


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        ({"K0": "4"}, Rule(k0=4)),
        (
            {"K0": "2", "K_MAX": "6", "RANK_CAP": "32", "P": "0.9", "TOKENS": "4-16", "PHASES": "verify"},
            Rule(2, 6, 32, 0.9, 4, 16, ("verify",)),
        ),
        ({"K0": "1", "PHASES": " verify, decode"}, Rule(k0=1)),
        ({"K0": "1", "COUNT": "on"}, Rule(k0=1, count=True)),
        ({"K0": "1", "COUNT": "off"}, Rule(k0=1)),
    ],
)
def test_settings(variables: dict[str, str], wanted: Rule | None) -> None:
    assert read({f"SGLANG_PATCHES_OEA_{name}": value for name, value in variables.items()} | {"PATH": "x"}) == wanted


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"K0": "0"}, "OEA_K0='0': wanted a whole number of experts from 1"),
        ({"K0": "three"}, "OEA_K0='three'"),
        ({"K0": "4", "K_MAX": "3"}, "OEA_K_MAX='3': wanted a whole number from K0=4"),
        ({"K0": "4", "RANK_CAP": "3"}, "OEA_RANK_CAP='3'"),
        ({"K0": "4", "P": "1"}, "OEA_P='1': wanted a share between 0 and 1"),
        ({"K0": "4", "P": "nan"}, "OEA_P='nan'"),
        ({"K0": "4", "TOKENS": "0-8"}, "OEA_TOKENS='0-8'"),
        ({"K0": "4", "TOKENS": "8"}, "OEA_TOKENS='8'"),
        ({"K0": "4", "TOKENS": "2-8²"}, "OEA_TOKENS='2-8²'"),
        ({"K0": "4", "TOKENS": "8-4"}, "OEA_TOKENS='8-4'"),
        ({"K0": "4", "TOKENS": "2-65"}, "between 1 and 64"),
        ({"K0": "4", "PHASES": "prefill"}, "OEA_PHASES='prefill'"),
        ({"K0": "4", "PHASES": ""}, "OEA_PHASES=''"),
        ({"K0": "4", "COUNT": "1"}, "OEA_COUNT='1': wanted on or off"),
        ({"COUNT": "on"}, "OEA_COUNT without SGLANG_PATCHES_OEA_K0"),
        ({"P": "0.5"}, "OEA_P without SGLANG_PATCHES_OEA_K0"),
        ({"K0": "4", "KMAX": "5"}, "OEA_KMAX: not known"),
    ],
)
def test_settings_that_cannot_be_meant(variables: dict[str, str], said: str) -> None:
    with pytest.raises(BadSetting) as refused:
        read({f"SGLANG_PATCHES_OEA_{name}": value for name, value in variables.items()})
    assert said in str(refused.value)
