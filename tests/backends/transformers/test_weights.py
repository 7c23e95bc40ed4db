"""Where parameters lie in an engine's storage, and what an update must bring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.decoders import both, greedy

from hybridflow.backends.transformers.parallel import Split
from hybridflow.backends.transformers.weights import StoredBox, WeightStore
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box


def test_rows_of_a_fused_tensor_are_read_and_written_in_the_parameters_own_order():
    """Of a parameter of six rows 2, 3 and 4 lie in rows 5, 0 and 3 of a storage of seven."""
    storage = torch.zeros(7, 2)
    place = StoredBox(storage, torch.tensor([5, 0, 3]), (6, 2), Box((2, 0), (5, 2)))
    values = torch.arange(6.0).view(3, 2)
    place.write(Box((2, 0), (5, 2)), values)
    assert storage[[5, 0, 3]].equal(values)
    assert not storage[[1, 2, 4, 6]].any()
    assert place.read(Box((3, 0), (5, 2))).equal(values[1:])
    place.write(Box((4, 1), (5, 2)), torch.tensor([[9]], dtype=torch.float64))
    assert storage[3].tolist() == [4.0, 9.0]
    assert place.read(Box((4, 1), (5, 2))).tolist() == [[9.0]]
    assert place.view(Box((3, 0), (5, 2))) is None


@pytest.mark.parametrize(
    "rows", [None, torch.randperm(150, generator=torch.Generator().manual_seed(0))]
)
def test_boxes_reach_memory_that_is_that_of_the_transpose(rows):
    """In blocks of rows, the last one smaller, with a cast."""
    storage = torch.zeros(5, 150).t()
    place = StoredBox(storage, rows, (150, 5), Box((0, 0), (150, 5)))
    values = torch.arange(600, dtype=torch.float64).view(150, 4)
    place.write(Box((0, 1), (150, 5)), values)
    expected = torch.zeros(150, 5)
    for row in range(150):
        expected[row if rows is None else rows[row], 1:] = values[row].float()
    assert storage.equal(expected)


def test_a_parameter_of_its_own_gives_views_to_write_to():
    storage = torch.zeros(4, 3)
    place = StoredBox.whole(storage)
    place.view(Box((1, 0), (3, 2))).fill_(1.0)
    assert storage.sum() == 4
    assert place.read(Box((0, 1), (2, 3))).tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_a_store_with_ties_and_lent_storage_counts_what_arrived():
    kept, lent = torch.ones(4, 2), torch.ones(3)
    store = WeightStore(
        {"a": StoredBox.whole(kept), "b": StoredBox.whole(lent)}, {"c": "a"}, Split()
    )
    store.lend("b")
    store.begin()
    store.receive("a", Box((0, 0), (4, 1)), torch.zeros(4, 1))
    with pytest.raises(HybridFlowError, match=r"a \(4 of 8"):
        store.end()
    store.receive("a", Box((0, 1), (4, 2)), torch.zeros(4, 1))
    store.end()
    with pytest.raises(HybridFlowError, match="c is tied to a; send that one alone"):
        store.receive("c", Box((0,), (1,)), torch.zeros(1))
    store.drop()
    assert kept.untyped_storage().nbytes() == 0
    assert lent.tolist() == [1.0, 1.0, 1.0]  # somebody else's
    store.restore()
    assert kept.untyped_storage().nbytes() == 4 * 2 * 4


# ---- of engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_layout_has_the_names_and_shapes_that_hugging_face_saves(
    tiny, tmp_path, model_type, tied
):
    from safetensors import safe_open

    case = tiny(model_type, hf={"tie_word_embeddings": tied})
    case.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    layout = case.engine.layout()
    assert {name: param.shape for name, param in layout.params.items()} == shapes
    assert layout.held == {0: {name: (Box.full(shape),) for name, shape in shapes.items()}}
    assert list(layout.ties) == (["lm_head.weight"] if tied else [])
    assert all(source in layout.params for source in layout.ties.values())


@both
def test_boxes_of_any_cut_make_up_the_weights(case):
    expected, weights, engine = greedy(case), case.model.state_dict(), case.bare_engine()
    draw = np.random.default_rng(0)
    engine.begin_update(7)
    for name, param in engine.layout().params.items():
        cuts = [sorted({0, n, *map(int, draw.integers(0, n + 1, size=2))}) for n in param.shape]
        for starts in np.ndindex(*[len(c) - 1 for c in cuts]):
            box = Box(
                tuple(c[i] for c, i in zip(cuts, starts, strict=True)),
                tuple(c[i + 1] for c, i in zip(cuts, starts, strict=True)),
            )
            engine.receive(name, box, weights[name][box.slices()].double())
    engine.end_update()
    case.engine = engine
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)
    assert set(greedy(case).weight_version) == {7}


@both
def test_what_is_no_parameter_or_has_another_shape_is_refused_by_name(case):
    engine = case.engine
    name, param = next(iter(engine.layout().params.items()))
    with pytest.raises(HybridFlowError, match="outside an update"):
        engine.receive(name, Box.full(param.shape), torch.zeros(param.shape))
    engine.begin_update(2)
    with pytest.raises(HybridFlowError, match=r"no parameter 'model\.nothing'"):
        engine.receive("model.nothing", Box.full((1,)), torch.zeros(1))
    with pytest.raises(HybridFlowError, match=rf"no parameter .*the nearest is '{name}'"):
        engine.receive(name + "s", Box.full(param.shape), torch.zeros(param.shape))
    with pytest.raises(HybridFlowError, match=rf"{name}: got a tensor of shape \(3,\)"):
        engine.receive(name, Box.full(param.shape), torch.zeros(3))
    big = (param.shape[0] + 1, *param.shape[1:])
    with pytest.raises(HybridFlowError, match=rf"{name}: the box .* does not lie in the shape"):
        engine.receive(name, Box.full(big), torch.zeros(big))


def test_a_tied_name_is_refused_with_the_name_to_send(tiny):
    engine = tiny("qwen2", hf={"tie_word_embeddings": True}, fresh=True).engine
    engine.begin_update(2)
    with pytest.raises(HybridFlowError, match=r"tied to model\.embed_tokens\.weight"):
        engine.receive("lm_head.weight", Box.full((48, 64)), torch.zeros(48, 64))


@both
def test_dropped_weights_must_all_come_again(case):
    expected = greedy(case)
    case.engine.store.drop()  # what sleep does on a GPU
    assert all(
        place.storage.untyped_storage().nbytes() == 0 for place in case.engine.store.places.values()
    )
    case.engine.store.restore()
    with pytest.raises(HybridFlowError, match="lacks"):
        case.update(2, names=[])
    case.update(2)
    np.testing.assert_array_equal(greedy(case).response_ids, expected.response_ids)
