"""Turning the integration on and off."""

import subprocess
import sys

import pytest
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear

from openkda.integrations import transformers as integration

CLASSES = (
    modeling_kimi_linear.KimiLinearDeltaAttention,
    modeling_kimi_linear.KimiLinearRMSNormGated,
    modeling_kimi_linear.KimiLinearModel,
    modeling_glm5_next.Glm5NextTextLinearAttention,
    modeling_glm5_next.Glm5NextTextRMSNormGated,
    modeling_glm5_next.Glm5NextTextModel,
)


def attributes() -> dict[str, object]:
    """All that stands in the classes and in their modules."""
    found: dict[str, object] = {f"{c.__name__}.{name}": value for c in CLASSES for name, value in vars(c).items()}
    for module in (modeling_kimi_linear, modeling_glm5_next):
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    return found


def test_disable_restores_every_attribute_by_identity():
    before = attributes()
    integration.enable()
    changed = {name for name, value in attributes().items() if before.get(name) is not value}
    assert changed == {f"{c.__name__}.forward" for c in CLASSES}
    integration.disable()
    after = attributes()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_enable_and_disable_are_idempotent():
    before = attributes()
    integration.disable()
    integration.enable()
    first = attributes()
    integration.enable()
    assert all(first[name] is value for name, value in attributes().items())
    integration.disable()
    integration.disable()
    assert all(before[name] is value for name, value in attributes().items())


def test_enabled_lasts_as_long_as_the_block_also_when_it_raises():
    with integration.enabled():
        assert integration.is_enabled()
    assert not integration.is_enabled()
    with pytest.raises(KeyError), integration.enabled():
        raise KeyError
    assert not integration.is_enabled()


def test_enabled_leaves_on_what_was_on():
    integration.enable()
    with integration.enabled():
        pass
    assert integration.is_enabled()


def test_disable_refuses_when_somebody_else_has_replaced_a_forward(monkeypatch: pytest.MonkeyPatch):
    integration.enable()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_kimi_linear.KimiLinearRMSNormGated, "forward", lambda self: None)
        with pytest.raises(RuntimeError, match=r"KimiLinearRMSNormGated.forward must be what enable\(\) put there"):
            integration.disable()
        assert integration.is_enabled()
    integration.disable()


@pytest.mark.parametrize("found", ["5.23.1", "5.24.1", None])
def test_enable_refuses_another_release_in_one_line(found: str | None, monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        if found is None:
            raise integration.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(integration.importlib.metadata, "version", version)
    before = attributes()
    with pytest.raises(ImportError, match=rf"transformers must be 5\.24\.0, got {found or 'none'}; ") as raised:
        integration.enable()
    assert "\n" not in str(raised.value)
    assert not integration.is_enabled()
    assert all(before[name] is value for name, value in attributes().items())


def test_importing_the_integration_imports_no_transformers():
    code = "import sys, openkda.integrations.transformers\nprint({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"
