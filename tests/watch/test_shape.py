"""Shapes derived from parameters: of our own models, of transformers' and torchvision's names, and of none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.probe.wire import Trained, TrainedModel, TrainedParameter
from gpumem_tui.watch.shape import Derived, derive
from gpumem_tui.workload.standard import CatalogWorkload

Dims = tuple[int, ...]


def trained(dims: Mapping[str, Dims], *, frozen: str = "-", truncated: bool = False) -> Trained:
    """A model of these parameters; those whose names begin with `frozen` are not trained."""
    parameters = tuple(
        TrainedParameter(name, shape, "float32", not name.startswith(frozen)) for name, shape in dims.items()
    )
    return Trained((TrainedModel("Model", parameters, truncated),), ())


def derived(dims: Mapping[str, Dims]) -> Derived:
    found = derive(trained(dims))
    assert isinstance(found, Derived), found
    return found


def why_not(what: Trained) -> str:
    found = derive(what)
    assert isinstance(found, Unknown), found
    return found.reason


def architecture(shape: ModelShape) -> ModelShape:
    """The parts of a shape that follow from its parameters, or from the catalog by its dimensions."""
    return replace(shape, name="", source="", published_parameters=None, seq_len=0, max_seq_len=0, dropout=0.0)


def our_model(shape: ModelShape) -> dict[str, Dims]:
    with torch.device("meta"):
        model, _ = CatalogWorkload(shape, Recipe(optimizer="sgd")).build(torch.device("meta"))
    assert isinstance(model, torch.nn.Module)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "name", [name for name, shape in models().items() if shape.layers <= 36 and shape.family != "moe"]
)
def test_our_own_models_are_recognized(name: str) -> None:
    shape = find_model(name)
    assert architecture(derived(our_model(shape)).shape) == architecture(shape)


def test_experts_are_of_no_family_that_parameters_tell() -> None:
    found = derive(trained(our_model(find_model("gpt-oss-20b"))))
    assert found == Unknown("Model is of no family known here")


def test_a_model_that_is_in_no_catalog() -> None:
    shape = find_model("gpt2").overridden(layers=3, hidden=320, heads=5, vocab=1000, seq_len=128)
    shape = replace(shape, max_seq_len=128)
    found = derived(our_model(shape))
    assert architecture(found.shape) == architecture(shape)
    assert found.assumed[0] == "5 heads of 64 and no dropout"
    assert found.assumed[-1] == "sequence length 128"


def gpt2(layers: int = 12, hidden: int = 768, prefix: str = "transformer.") -> dict[str, Dims]:
    """transformers' GPT2LMHeadModel: Conv1D keeps its weights transposed, and the head is tied."""
    dims: dict[str, Dims] = {"wte.weight": (50257, hidden), "wpe.weight": (1024, hidden)}
    for layer in range(layers):
        block = {
            "ln_1.weight": (hidden,),
            "ln_1.bias": (hidden,),
            "attn.c_attn.weight": (hidden, 3 * hidden),
            "attn.c_attn.bias": (3 * hidden,),
            "attn.c_proj.weight": (hidden, hidden),
            "attn.c_proj.bias": (hidden,),
            "ln_2.weight": (hidden,),
            "ln_2.bias": (hidden,),
            "mlp.c_fc.weight": (hidden, 4 * hidden),
            "mlp.c_fc.bias": (4 * hidden,),
            "mlp.c_proj.weight": (4 * hidden, hidden),
            "mlp.c_proj.bias": (hidden,),
        }
        dims |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    dims |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    return {prefix + name: shape for name, shape in dims.items()}


def llama(layers: int = 16) -> dict[str, Dims]:
    """transformers' LlamaForCausalLM at the size of Llama 3.2 1B, whose head is tied."""
    dims: dict[str, Dims] = {"model.embed_tokens.weight": (128256, 2048)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj.weight": (2048, 2048),
            "self_attn.k_proj.weight": (512, 2048),
            "self_attn.v_proj.weight": (512, 2048),
            "self_attn.o_proj.weight": (2048, 2048),
            "mlp.gate_proj.weight": (8192, 2048),
            "mlp.up_proj.weight": (8192, 2048),
            "mlp.down_proj.weight": (2048, 8192),
            "input_layernorm.weight": (2048,),
            "post_attention_layernorm.weight": (2048,),
        }
        dims |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {**dims, "model.norm.weight": (2048,)}


def bert() -> dict[str, Dims]:
    """transformers' BertForSequenceClassification."""
    dims: dict[str, Dims] = {
        "bert.embeddings.word_embeddings.weight": (30522, 768),
        "bert.embeddings.position_embeddings.weight": (512, 768),
        "bert.embeddings.token_type_embeddings.weight": (2, 768),
        "bert.embeddings.LayerNorm.weight": (768,),
        "bert.embeddings.LayerNorm.bias": (768,),
    }
    for layer in range(12):
        for name, shape in {
            "attention.self.query": (768, 768),
            "attention.self.key": (768, 768),
            "attention.self.value": (768, 768),
            "attention.output.dense": (768, 768),
            "intermediate.dense": (3072, 768),
            "output.dense": (768, 3072),
        }.items():
            dims[f"bert.encoder.layer.{layer}.{name}.weight"] = shape
            dims[f"bert.encoder.layer.{layer}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            dims |= {f"bert.encoder.layer.{layer}.{name}.{part}": (768,) for part in ("weight", "bias")}
    dims |= {"bert.pooler.dense.weight": (768, 768), "bert.pooler.dense.bias": (768,)}
    return {**dims, "classifier.weight": (5, 768), "classifier.bias": (5,)}


def vit() -> dict[str, Dims]:
    """torchvision's vit_b_16."""
    dims: dict[str, Dims] = {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "conv_proj.bias": (768,),
        "encoder.pos_embedding": (1, 197, 768),
    }
    for layer in range(12):
        block: dict[str, Dims] = {
            "self_attention.in_proj_weight": (2304, 768),
            "self_attention.in_proj_bias": (2304,),
            "self_attention.out_proj.weight": (768, 768),
            "self_attention.out_proj.bias": (768,),
            "mlp.0.weight": (3072, 768),
            "mlp.0.bias": (3072,),
            "mlp.3.weight": (768, 3072),
            "mlp.3.bias": (768,),
        }
        block |= {f"{norm}.{part}": (768,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
        dims |= {f"encoder.layers.encoder_layer_{layer}.{name}": shape for name, shape in block.items()}
    dims |= {"encoder.ln.weight": (768,), "encoder.ln.bias": (768,)}
    return {**dims, "heads.head.weight": (1000, 768), "heads.head.bias": (1000,)}


@pytest.mark.parametrize(
    ("dims", "name"),
    [
        (gpt2(), "gpt2"),
        (gpt2(prefix="module._orig_mod.transformer."), "gpt2"),
        (gpt2(24, 1024), "gpt2-medium"),
        (llama(), "llama-3.2-1b"),
        (vit(), "vit-b-16"),
    ],
)
def test_models_of_others(dims: Mapping[str, Dims], name: str) -> None:
    found = derived(dims)
    assert found.shape.name == name
    assert architecture(found.shape) == architecture(find_model(name))


def test_a_classifier_keeps_its_own_number_of_classes() -> None:
    assert architecture(derived(bert()).shape) == replace(architecture(find_model("bert-base")), classes=5)


def test_a_model_of_the_same_width_is_not_called_by_anothers_name() -> None:
    """Mistral 7B and Llama 3 8B differ in their vocabularies only."""
    assert derived({**gpt2(), "transformer.wte.weight": (1000, 768)}).shape.name == "Model"


def test_an_untied_head() -> None:
    assert not derived({**gpt2(), "lm_head.weight": (50257, 768)}).shape.tied_head


def test_what_cannot_be_told_has_a_reason() -> None:
    more = {f"adapter.{number}.weight": (4096, 1024) for number in range(8)}
    assert "is no plain gpt2 model" in why_not(trained({**gpt2(), **more}))
    assert why_not(trained({"a.weight": (3, 4, 5)})) == "Model is of no family known here"
    head = {
        "cls.predictions.bias": (30522,),
        **{name: dims for name, dims in bert().items() if "classifier" not in name},
    }
    assert why_not(trained(head)) == "Model is of no family known here"
    assert why_not(Trained((), ())) == "the probe found no module"
    assert "more parameters than the probe lists" in why_not(trained(gpt2(), truncated=True))
    assert why_not(trained(gpt2(), frozen="transformer.h")).startswith("only 31.7% of the parameters")
    both = Trained((*trained(gpt2()).models, *trained(bert()).models), ())
    assert why_not(both) == "2 models are trained together"


def test_a_little_that_is_not_explained_is_said() -> None:
    found = derived({**gpt2(), "scale": (1000,)})
    assert found.assumed[-1] == "1,000 of 124,440,808 parameters left out of account"


def test_what_is_frozen_or_trained_beside_it_is_said() -> None:
    frozen = derive(trained(gpt2(), frozen="transformer.wpe"))
    assert isinstance(frozen, Derived)
    assert frozen.assumed[-1] == "all parameters trained, though 0.6% of them are frozen"
    critic = TrainedModel("my.Critic", (TrainedParameter("value.weight", (1000, 1000), "float32", True),), False)
    beside = derive(Trained((*trained(gpt2()).models, critic), ()))
    assert isinstance(beside, Derived)
    assert beside.assumed[-1] == "Critic, trained next to it with 1,000,000 parameters, left out of account"
    assert derived(gpt2()).assumed == beside.assumed[:-1] == frozen.assumed[:-1]
