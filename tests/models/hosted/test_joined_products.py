"""Layers of a hosted model that read the same are one product, whose parts are what each would give."""

from __future__ import annotations

import json

import pytest
import torch
from hosted_cases import CASES
from transformers import CONFIG_MAPPING

from vnext.models.hosted import modules
from vnext.models.hosted.description import Kind, describe
from vnext.models.hosted.looking import Input, alike
from vnext.models.hosted.modules import Joined, Product, Run
from vnext.models.layers.layers import Linear, operations


def settings(name: str, vocab_size: int) -> str:
    """A config.json of one layer that no other test has."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    return json.dumps(CONFIG_MAPPING[name](**{**sizes, **CASES[name]}, vocab_size=vocab_size).to_dict(), sort_keys=True)


@pytest.mark.parametrize("name", ["cohere", "phi", "gptj"])
def test_which_layers_are_one(name: str) -> None:
    """Those of one module: an MLP beside attention reads the same, but is apart."""
    weights = describe(settings(name, 311)).weights
    found = [[part.module.rpartition(".")[2] for part in (each, *each.others)] for each in weights if each.others]
    assert found == [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]][: 2 if name == "cohere" else 1]
    assert sum(each.kind is Kind.PART for each in weights) == sum(len(names) - 1 for names in found)


def test_layers_read_the_same_when_nothing_changes_it_between_them() -> None:
    x, other = torch.ones(3), torch.ones(3)
    calls = [Input("a", x, 0), Input("b", other, 0), Input("c", x, 0), Input("d", x, 1), Input("e", x, 1), Input("f", x, 1)]
    assert alike([*calls, Input("f", other, 0)]) == (("a", "c"), ("d", "e"))


@torch.inference_mode()
def test_parts_are_of_one_product_for_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, (x, other) = torch.randn(12, 8, generator=generator), torch.randn(2, 1, 5, 8, generator=generator)
    plain, made = Product.forward, list[torch.Tensor]()
    monkeypatch.setattr(Product, "forward", lambda self, given: made.append(given) or plain(self, given))
    joined = Joined(Product(Run(), 12, linear=Linear(operations("cpu").pack_weight(weight), None)), (6, 4, 2))
    for given, places in ((x, (0, 1, 2)), (other, (0, 1, 2)), (x, (1,)), (other, (2, 0)), (x, (0, 2))):
        for place in places:
            first, end = ((0, 6), (6, 10), (10, 12))[place]
            assert torch.allclose(joined.part(given, place), given @ weight[first:end].T, atol=1e-5)
    assert [each is x for each in made] == [True, False, True, False, False, True]
    assert joined._made is None, "what the last part was of is let go"


def test_a_model_that_takes_no_parts_has_products_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: modules.Part, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr(modules.Part, "forward", refuse)
    weights = describe(settings("cohere", 313)).weights
    assert not any(each.others for each in weights) and sum(each.kind is Kind.PRODUCT for each in weights) == 7
