"""Packed rows do not see each other: for every model type that is packed, and on both devices' ways."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.kit.huggingface import attention
from hybridflow.kit.huggingface.attention import PackedRows, attend, takes_any_lengths
from hybridflow.kit.huggingface.modeling import running_config
from hybridflow.kit.huggingface.models import PACKABLE, attention_of, why_padded

CPU = torch.device("cpu")
LENGTHS = [3, 4, 4, 7]
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
    ffn_dim=48, word_embed_proj_dim=32, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    n_group=1, topk_group=1, first_k_dense_replace=1, bos_token_id=None, eos_token_id=None,
    pad_token_id=None, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=12, sliding_window=None,
)  # fmt: skip
"""Of all types together: each config takes the fields that it has."""


def tiny_config(kind: str):
    known = AutoConfig.for_model(kind)
    fields = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    # Multi-head latent attention has no groups, and sizes of its own for keys and values.
    if hasattr(known, "v_head_dim"):
        fields["num_key_value_heads"] = 4
    elif hasattr(known, "head_dim"):
        fields["head_dim"] = 8
    return AutoConfig.for_model(kind, **fields)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_packed_rows_have_the_states_of_each_row_alone(kind):
    """By Hugging Face's own attention on every row; a changed neighbour changes nothing."""
    config = tiny_config(kind)
    assert why_padded(config.to_dict()) is None
    assert attention_of(config) == "sdpa"
    running = running_config(config)
    assert running._attn_implementation == attention.NAME
    model = AutoModelForCausalLM.from_config(running, dtype=torch.float32).eval()
    config._attn_implementation = "eager"
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.load_state_dict(reference.state_dict())
    rows = [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]

    @torch.no_grad()
    def states(rows):
        found = model.base_model(
            input_ids=torch.cat(rows)[None],
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
            packed_rows=PackedRows(LENGTHS, CPU),
            use_cache=False,
        )
        return found.last_hidden_state[0].split(LENGTHS)

    found = states(rows)
    for row, values in zip(rows, found, strict=True):
        with torch.no_grad():
            expected = reference.base_model(input_ids=row[None], use_cache=False).last_hidden_state
        torch.testing.assert_close(values, expected[0], atol=2e-4, rtol=2e-4)
    # Rows 1 and 3 again, as tails of the first three tokens of each.
    heads = [row[:3] for row in (rows[1], rows[3])]
    tails = [rows[3][3:], rows[1][3:]]
    with torch.no_grad():
        shared = model.base_model(
            input_ids=torch.cat([*heads, *tails])[None],
            position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 3]]),
            packed_rows=PackedRows([3, 3], CPU, [(1, 4), (0, 1)]),
            use_cache=False,
        ).last_hidden_state[0]
    for places, row in (([0, 1, 2, 10], 1), ([3, 4, 5, 6, 7, 8, 9], 3)):
        torch.testing.assert_close(shared[places], found[row], atol=1e-4, rtol=1e-4)
    changed = states([rows[0], (rows[1] + 7) % 60, *rows[2:]])
    assert (changed[1] - found[1]).abs().max() > 1e-2
    for at in (0, 2, 3):
        torch.testing.assert_close(changed[at], found[at], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "nemotron"}, "nemotron are not known to be apart"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "part of",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "part of a row"),
        ({"model_type": "mistral"}, "part of a row"),
        ({"model_type": "phi3", "sliding_window": 8}, "part of a row"),
        ({"model_type": "llama", "attn_logit_softcapping": 50.0}, "capped"),
    ],
)
def test_why_a_model_is_padded(fields, reason):
    assert reason in why_padded(fields)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_fields_that_are_left_out_mean_what_transformers_takes_for_them(kind):
    """Its own config with every field says the same as the type alone, and so with a window."""
    for fields in ({}, {"sliding_window": 8}, {"sliding_window": None}):
        whole = AutoConfig.for_model(kind, **fields).to_dict()
        assert why_padded({"model_type": kind, **fields}) == why_padded(whole), fields


def brute_force(query, key, value, lengths, scale, tails=()):
    """Softmax over each row's tokens up to the query's own, in float64: [N, heads, D].

    A tail sees the row that is its prompt as well.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    attended = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    sizes = [*lengths, *(length for _, length in tails)]
    places = torch.arange(sum(sizes)).split(sizes)
    before = [None] * len(lengths) + [prompt for prompt, _ in tails]
    for own, prompt in zip(places, before, strict=True):
        for count, at in enumerate(own.tolist(), 1):
            seen = own[:count] if prompt is None else torch.cat([places[prompt], own[:count]])
            scores = torch.einsum("hd,nhd->hn", query[at].double(), key[seen]) * scale
            attended[at] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value[seen])
    return attended


def drawn(value_size: int = 8):
    """Query of 4 heads, key and value of 2: [1, heads, 18, D] as transformers gives them."""
    torch.manual_seed(0)
    total = sum(LENGTHS)
    return [torch.randn(1, h, total, d) for h, d in ((4, 8), (2, 8), (2, value_size))]


def shapes(rows, width=32):
    return [(block.count, block.queries, block.keys) for block in rows.blocks(width).blocks]


@pytest.fixture(params=[0, 32 * 25, 1 << 30], ids=["equal", "alike", "one block"])
def spared(request, monkeypatch):
    """Padding of a block, for queries of 32 numbers: none, 25 pairs of query and key, any."""
    monkeypatch.setattr(attention, "MOST_PADDING", request.param)
    return {0: "equal", 32 * 25: "alike"}.get(request.param, "one")


@pytest.mark.parametrize("value_size", [8, 6])
def test_rows_in_blocks_are_attended_to_like_by_brute_force(value_size, spared):
    rows = PackedRows(LENGTHS, CPU)
    assert (
        shapes(rows)
        == {
            "equal": [(1, 3, 3), (2, 4, 4), (1, 7, 7)],
            # 3 x 16 - 9 - 2 x 16 = 7 pairs are padding; with a row of 4 beside one of 7 it were 33.
            "alike": [(3, 4, 4), (1, 7, 7)],
            "one": [(4, 7, 7)],
        }[spared]
    )
    assert (rows.blocks(32).at is None) == (spared == "equal")
    assert rows.bounds.tolist() == [0, 3, 7, 11, 18]
    query, key, value = drawn(value_size)
    found, weights = attend(None, query, key, value, scaling=0.3, packed_rows=rows)
    assert weights is None
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    expected = brute_force(*flat, LENGTHS, 0.3).float()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_padded_rows_are_causal():
    query, key, value = drawn()
    found, _ = attend(None, query, key, value, scaling=0.3)
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    expected = brute_force(*flat, [sum(LENGTHS)], 0.3).float()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


TAILS = [(1, 2), (2, 2), (2, 2), (0, 3), (3, 1)]
"""Of the rows of LENGTHS: two prompts of 4 tokens have tails of 2, and so on."""


def with_tails():
    torch.manual_seed(1)
    total = sum(LENGTHS) + sum(length for _, length in TAILS)
    return [torch.randn(1, h, total, 8, requires_grad=True) for h in (4, 2, 2)]


def test_tails_see_their_prompt_and_themselves_like_by_brute_force(spared):
    """And so do the gradients: a prompt's is the sum over its tails and itself."""
    rows = PackedRows(LENGTHS, CPU, TAILS)
    assert (
        shapes(rows)[-3:]
        == {
            "equal": [(1, 1, 8), (3, 2, 6), (1, 3, 6)],
            # Tails of 2 beside the one of 3: 4 x 3 x 7 - 3 x 2 x 6 - 3 x 6 = 30 pairs were padding.
            "alike": [(1, 7, 7), (2, 2, 9), (3, 3, 7)],
            "one": [(4, 7, 7), (5, 3, 10)],
        }[spared][-3:]
    )
    inputs = with_tails()
    found, _ = attend(None, *inputs, scaling=0.3, packed_rows=rows)
    flat = [x[0].transpose(0, 1) for x in inputs]
    expected = brute_force(*flat, LENGTHS, 0.3, TAILS).float()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(expected.shape)
    gradients = torch.autograd.grad((found[0] * weights).sum(), inputs)
    for gradient, wanted in zip(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_prompts_of_one_length_share_a_mask_and_a_large_mask_is_for_nobody_else(monkeypatch):
    monkeypatch.setattr(attention, "MOST_PADDING", 1 << 30)
    rows = PackedRows([4, 4], CPU, [(0, 3), (1, 2), (1, 3)])
    assert shapes(rows) == [(2, 4, 4), (3, 3, 7)]
    assert rows.blocks(32).blocks[1].mask.shape == (1, 1, 3, 7)
    rows = PackedRows([4, 5], CPU, [(0, 3), (1, 2), (1, 3)])
    assert rows.blocks(32).blocks[1].mask.shape == (3, 1, 3, 8)
    monkeypatch.setattr(attention, "MOST_MASKED", 3 * 3 * 8 - 1)
    rows = PackedRows([4, 5], CPU, [(0, 3), (1, 2), (1, 3)])
    assert shapes(rows) == [(2, 5, 5), (1, 2, 7), (2, 3, 8)]


@pytest.mark.parametrize("asks", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("tails", [[], TAILS], ids=["rows", "tails"])
def test_on_a_gpu_one_kernel_is_told_of_all_rows(monkeypatch, tails, asks):
    """The kernel itself needs a GPU (tests/gpu): brute force stands for it, by its documentation's arguments.

    Causal is bottom-right: the last query of a sequence sees its last key. PyTorch 2.11 takes
    fewer heads of key and value unasked, and has no argument for them.
    """

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (scale, window_size) == (0.3, (-1, 0))
        queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
        assert (max_q, max_k) == (max(queries), max(keys))
        attended = []
        sequences = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
        for q, k, v in sequences:
            unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            attended.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(attended)

    def asking(*tensors, enable_gqa=False, **options):
        assert enable_gqa
        return kernel(*tensors, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", asking if asks else kernel)
    query, key, value = with_tails() if tails else drawn()
    rows = PackedRows(LENGTHS, CPU, tails)
    assert not takes_any_lengths(query, value)
    by_runs, _ = attend(None, query, key, value, scaling=0.3, packed_rows=rows)
    monkeypatch.setattr(attention, "takes_any_lengths", lambda query, value: True)
    at_once, _ = attend(None, query, key, value, scaling=0.3, packed_rows=rows)
    torch.testing.assert_close(at_once, by_runs, atol=1e-5, rtol=1e-5)
