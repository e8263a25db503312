"""`evict=NAME` says every option of a policy, with the default that the code has."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
import yaml

from longtrain.methods.policies import POLICIES, policy_class


@pytest.mark.parametrize("name", POLICIES)
def test_a_configuration_says_what_the_code_does(root, name):
    written = yaml.safe_load((root / "conf" / "evict" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert written.pop("policy") == name
    assert written.pop("budget_tokens") == 128
    assert written.pop("budget_ratio") is None
    options = {field.name: field for field in fields(policy_class(name)) if field.name != "budget"}
    assert set(written) == set(options)
    for key, value in written.items():
        field = options[key]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert value == default, key
    assert policy_class(name).name == name
