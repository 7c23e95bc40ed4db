"""The forward of a role, row by row against Hugging Face's; and how its model is built."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from hybridflow.core.contracts.training import MicroBatch
from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.huggingface import modeling
from hybridflow.kit.huggingface.modeling import (
    RoleModel,
    build_hf_model,
    canonical,
    hf_config,
    pick,
    running_config,
    saved_buffers,
    spread,
    ties_of,
    token_outputs,
)
from hybridflow.kit.testing.models import VOCAB, Sequences, reference, tiny_config

ROWS = Sequences.random([(3, 5), (1, 1), (6, 2), (2, 4)])
POLICY_NEEDS = ["logprobs", "entropy", "topk_logprobs"]


def role_of(spec: ModelSpec) -> RoleModel:
    return RoleModel(build_hf_model(spec, torch.float32)[0], spec.kind)


def micro(rows: Sequences, topk_ids: torch.Tensor | None = None) -> MicroBatch:
    pairs = zip(rows.prompts, rows.responses, strict=True)
    ids = pad_sequence([torch.cat(pair) for pair in pairs], batch_first=True)
    prompts = torch.tensor([len(prompt) for prompt in rows.prompts])
    responses = torch.tensor([len(response) for response in rows.responses])
    return MicroBatch(ids, prompts, responses, topk_ids)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def wanted(ref, temperature: float, topk_ids: torch.Tensor | None = None):
    """Of each row, by Hugging Face's model on that row alone."""
    for at, (prompt, response) in enumerate(zip(ROWS.prompts, ROWS.responses, strict=True)):
        asked = None if topk_ids is None else topk_ids[at, : len(response)]
        yield ref.outputs(prompt, response, temperature, asked)


def test_a_pad_token_in_a_row_trains_its_embedding():
    """The model's config may name a pad token, as exports do: the gradient is that of a model without one."""
    gradients = []
    for fields in ({}, {"pad_token_id": 3}):
        role = role_of(ModelSpec({**tiny_config(), **fields}, None, 0))
        reference_weights = gradients[0][0] if gradients else role.state_dict()
        role.load_state_dict(reference_weights)
        batch = MicroBatch(torch.tensor([[5, 3, 7, 3]]), torch.tensor([2]), torch.tensor([2]), None)
        outputs = role(batch, ["logprobs"], 1.0)
        outputs["logprobs"].sum().backward()
        gradient = role.hf.get_input_embeddings().weight.grad
        gradients.append((reference_weights, gradient))
    assert gradients[0][1][3].abs().sum() > 0
    assert gradients[0][1].equal(gradients[1][1])


PECULIAR = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5},
    "seed_oss": {"residual_dropout": 0.5, "head_dim": 8},
}
"""Model types whose logits are more than a head's output, whose scores are no plain ones, or with dropouts of their own."""


@pytest.mark.parametrize("model_type", PECULIAR)
def test_what_an_architecture_does_around_head_and_scores_is_done_in_training(model_type):
    fields = {**tiny_config(), "model_type": model_type, **PECULIAR[model_type]}
    del fields["head_dim" if "head_dim" not in PECULIAR[model_type] else "bos_token_id"]
    spec = ModelSpec(fields, None, 0)
    role = role_of(spec).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))

    # Hugging Face's own forward, in eager mode, of each row alone
    twin = AutoModelForCausalLM.from_config(hf_config(spec), attn_implementation="eager").eval()
    twin.load_state_dict(role.hf.state_dict())
    with torch.no_grad():
        found = role(micro(ROWS), ["logprobs"], 1.0)["logprobs"]
        for row, (prompt, response) in enumerate(zip(ROWS.prompts, ROWS.responses, strict=True)):
            logits = twin(input_ids=torch.cat([prompt, response])[None]).logits
            before = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            expected = before.gather(-1, response[:, None])[:, 0]
            close(found[row, : len(response)], expected)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_outputs_of_padded_rows_are_those_of_each_row_alone(architecture, temperature):
    ref, topk_ids = reference(architecture), torch.randint(0, VOCAB, (4, 5, 3))
    with torch.no_grad():
        found = role_of(ref.spec)(micro(ROWS, topk_ids), POLICY_NEEDS, temperature)
        for at, row in enumerate(wanted(ref, temperature, topk_ids)):
            length = len(ROWS.responses[at])
            for name in POLICY_NEEDS:
                close(found[name][at, :length], row[name])
                assert (found[name][at, length:] == 0).all()


@pytest.mark.parametrize(
    "needs", [POLICY_NEEDS, ["values"], ["scores"]], ids=["policy", "value", "score"]
)
def test_packed_rows_compute_no_token_that_predicts_nothing(needs):
    """The trunk sees each row without its last token, or whole for a score; outputs are those of padded rows."""
    kind = {"values": "value", "scores": "score"}.get(needs[0], "policy")
    role = role_of(reference("qwen2", kind).spec)
    topk_ids = torch.randint(0, VOCAB, (4, 5, 3)) if kind == "policy" else None
    padded = micro(ROWS, topk_ids)
    order = padded.lengths.argsort(stable=True)
    starts = torch.empty(4, dtype=torch.int64)
    starts[order] = padded.lengths[order].cumsum(0) - padded.lengths[order]
    ids = torch.cat([torch.cat([ROWS.prompts[i], ROWS.responses[i]]) for i in order.tolist()])[None]
    packed = attrs.evolve(
        padded, ids=ids, prompt_at=starts, response_at=starts + padded.prompt_lengths
    )

    seen = []
    hook = role.hf.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        found, expected = (role(rows, needs, 1.0) for rows in (packed, padded))
    hook.remove()
    tokens = int(padded.lengths.sum()) - (0 if kind == "score" else 4)
    assert seen[0]["input_ids"].shape == seen[0]["position_ids"].shape == (1, tokens)
    assert set(found) == set(needs)
    for name, values in expected.items():
        close(found[name], values)


def test_packed_rows_of_one_token_have_none_to_leave_out():
    role = role_of(reference().spec)
    one = torch.ones(2, dtype=torch.int64)
    at = torch.tensor([0, 1])
    rows = MicroBatch(torch.tensor([[3, 4]]), one, 0 * one, prompt_at=at, response_at=at + 1)
    assert role(rows, ["logprobs"], 1.0)["logprobs"].shape == (2, 0)


def test_the_largest_logprobs_come_with_their_tokens():
    ref = reference("qwen2")
    with torch.no_grad():
        found = role_of(ref.spec)(micro(ROWS), ["topk:2"], 1.0)
        for at, row in enumerate(wanted(ref, 1.0)):
            values, ids = row["log_softmax"].sort(descending=True)
            assert found["topk_ids"][at, : len(ids)].tolist() == ids[:, :2].tolist()
            close(found["topk_logprobs"][at, : len(ids)], values[:, :2])


@pytest.mark.parametrize(("kind", "need"), [("value", "values"), ("score", "scores")])
def test_a_value_stands_before_its_token_and_a_score_at_the_last_one(kind, need):
    ref = reference("llama", kind)
    with torch.no_grad():
        found = role_of(ref.spec)(micro(ROWS), [need], 1.0)[need]
        for at, row in enumerate(wanted(ref, 1.0)):
            mine = found[at] if kind == "score" else found[at, : len(ROWS.responses[at])]
            close(mine, row[need])


def test_logits_in_pieces_give_the_same_numbers_and_gradients(monkeypatch):
    """12 response tokens in pieces of 5, made again in the backward."""
    role, batch = role_of(reference("qwen2").spec), micro(ROWS)
    weights = torch.randn(2, len(ROWS), batch.width)

    def passed() -> list[torch.Tensor]:
        outputs = role(batch, ["logprobs", "entropy"], 0.9)
        total = (weights[0] * outputs["logprobs"] + weights[1] * outputs["entropy"]).sum()
        role.zero_grad()
        total.backward()
        return [*outputs.values(), *(p.grad for p in role.parameters())]

    whole = passed()
    heads = []
    count = lambda module, given, made: heads.append(len(given[0]))  # noqa: E731
    handle = role.head.register_forward_hook(count)
    monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", 5 * VOCAB)
    for one, other in zip(whole, passed(), strict=True):
        close(one, other)
    handle.remove()
    assert sorted(heads) == [2, 2, 5, 5, 5, 5]


def test_token_outputs_at_temperature_0_are_of_the_plain_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    found = dict(token_outputs(logits, torch.tensor([1]), ["logprobs"], 0.0, None))
    assert found["logprobs"].item() == pytest.approx(1 - math.log(1 + math.e + math.e**2))


def test_what_is_picked_and_spread_has_the_gradients_of_indexing():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    places, rows, at = torch.tensor([4, 0, 5]), torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0])
    assert torch.equal(pick(hidden, places), hidden[[1, 0, 1], [1, 0, 2]])
    assert torch.autograd.gradcheck(lambda h: pick(h, places), hidden)
    flat = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert spread(flat, rows, at, (2, 2)).tolist() == [[2.0, 0.0], [3.0, 1.0]]
    assert torch.autograd.gradcheck(lambda f: spread(f, rows, at, (2, 2)), flat)


def test_random_weights_follow_from_the_seed_and_leave_the_generator_alone():
    fields = tiny_config("llama")
    before = torch.get_rng_state()
    specs = [ModelSpec(fields, None, seed) for seed in (1, 1, 2)]
    first, again, other = (build_hf_model(spec, torch.float32)[0] for spec in specs)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.model.layers[1].mlp.up_proj.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_folder_is_read_with_its_weights_in_the_dtype_that_is_asked_for():
    ref = reference("llama")
    model, config = build_hf_model(ref.spec, torch.bfloat16)
    assert config.model_type == "llama" and model.dtype == torch.bfloat16
    for name, values in model.state_dict().items():
        assert torch.equal(values, ref.parameters[name].bfloat16()), name


def test_the_config_to_train_with_has_no_dropout_and_the_exported_one_keeps_it():
    spec = ModelSpec({**tiny_config(), "attention_dropout": 0.25}, None, 0)
    model, exported = build_hf_model(spec, torch.float32)
    assert model.config.attention_dropout == 0.0 and exported.attention_dropout == 0.25
    gpt2 = hf_config(ModelSpec({"model_type": "gpt2", "vocab_size": 8}, None, 0))
    assert gpt2.resid_pdrop == 0.1
    assert [running_config(gpt2).resid_pdrop, running_config(gpt2).embd_pdrop] == [0.0, 0.0]


def test_a_value_model_has_one_number_and_a_padding_token():
    config = hf_config(ModelSpec(tiny_config(), None, 0, "value"))
    assert (config.num_labels, config.pad_token_id) == (1, 0)


def test_what_transformers_does_not_take_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"does not accept this model config: .*unheard-of"):
        hf_config(ModelSpec({"model_type": "unheard-of"}, None, 0))
    hf_config(ModelSpec(tiny_config(), None, 0)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"could not build 'qwen2' from {tmp_path}"):
        build_hf_model(ModelSpec(tiny_config(), str(tmp_path), 0), torch.float32)


def test_names_are_those_of_the_saved_model():
    assert canonical("hf.model.norm.weight") == "model.norm.weight"
    layer = "model.layers.0.self_attn.q_proj"
    assert canonical(f"hf.{layer}.base_layer.weight") == f"{layer}.weight"
    assert canonical(f"hf.{layer}.lora_A.default.weight") == f"{layer}.lora_A.weight"
    tied = role_of(reference("qwen2").spec)
    assert ties_of(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert ties_of(role_of(reference("llama").spec)) == {}


def test_a_checkpoint_has_buffers_that_are_not_made_anew():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module.register_buffer("own", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    found = dict(saved_buffers(module))
    parameters = {name for name, _ in module.named_parameters()}
    assert found.keys() == module.state_dict().keys() - parameters
    assert found["own"] is module.own
