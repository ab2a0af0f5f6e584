import pytest
import torch
from torch.func import grad, vmap

from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.errors import SettingsError
from tests.helpers import tiny_models

CLASSES = ["cat", "very long name", "alarm_clock", "dog"]
SENTENCE = "a photo of a"
TEMPLATE = SENTENCE + " {}."


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def encoder(request, tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip"), activation=request.param))


@pytest.fixture(scope="module")
def tower(encoder):
    return encoder.text_tower(CLASSES, TEMPLATE)


def words(encoder):
    """(4, width) token embeddings of SENTENCE."""
    ids = encoder.tokenizer(SENTENCE, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return encoder.model.text_model.embeddings.token_embedding(ids[0])


def official(encoder, context):
    """All 24 positions of every class through the library's own layers and attention mask."""
    text, room = encoder.model.text_model, 24
    rows, ends = [], []
    for name in CLASSES:
        ids = encoder.tokenizer(name.replace("_", " ") + ".")["input_ids"]
        ids += [ids[-1]] * (room - len(context) - len(ids))
        table = text.embeddings.token_embedding(torch.tensor(ids))
        rows.append(torch.cat([table[:1], context, table[1:]]))
        ends.append(len(context) + ids.index(ids[-1]))
    x = text.embeddings(inputs_embeds=torch.stack(rows))
    mask = torch.full((room, room), torch.finfo(torch.float32).min).triu(1)[None, None]
    x = text.final_layer_norm(text.encoder(inputs_embeds=x, attention_mask=mask).last_hidden_state)
    features = encoder.model.text_projection(x[torch.arange(len(CLASSES)), torch.tensor(ends)])
    return torch.nn.functional.normalize(features, dim=-1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_real_sentence_as_context_gives_the_official_text_features(encoder, attention):
    encoder.model.set_attn_implementation(attention)
    sentences = [f"{SENTENCE} {name.replace('_', ' ')}." for name in CLASSES]
    features = encoder.text_tower(CLASSES, TEMPLATE)(words(encoder))
    assert torch.allclose(features, encoder.embed_text(sentences), atol=1e-5)
    assert features.std() > 0.05  # the tiny tower tells the sentences apart


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shared_prefix_equals_the_full_path_also_in_its_gradient(encoder, tower, attention):
    encoder.model.set_attn_implementation(attention)
    context = torch.randn(5, tower.width, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(len(CLASSES), encoder.dim, generator=torch.Generator().manual_seed(2))
    results = []
    for path in (tower, lambda ctx: official(encoder, ctx)):
        ctx = context.clone().requires_grad_()
        features = path(ctx)
        (features * weight).sum().backward()
        results.append((features.detach(), ctx.grad))
    (prefix_features, our_gradient), (theirs, their_gradient) = results
    assert torch.allclose(prefix_features, theirs, atol=1e-5)
    assert torch.allclose(our_gradient, their_gradient, atol=1e-5)
    assert our_gradient.abs().max() > 1e-3


def test_old_checkpoints_that_call_token_two_the_end_work_too(tmp_path):
    encoder = HuggingFace(tiny_models.clip(tmp_path, eos=2))
    sentences = [f"{SENTENCE} {name.replace('_', ' ')}." for name in CLASSES]
    features = encoder.text_tower(CLASSES, TEMPLATE)(words(encoder))
    assert torch.allclose(features, encoder.embed_text(sentences), atol=1e-5)


def test_prompts_are_encoded_one_by_one_or_all_at_once(tower):
    contexts = torch.randn(2, 3, 4, tower.width, generator=torch.Generator().manual_seed(3))
    batched = tower(contexts)
    assert batched.shape == (2, 3, len(CLASSES), tower.projection.shape[0])
    for i in range(2):
        for j in range(3):
            assert torch.allclose(batched[i, j], tower(contexts[i, j]), atol=1e-5)


def test_a_class_does_not_depend_on_the_other_classes(encoder, tower):
    context = torch.randn(4, tower.width, generator=torch.Generator().manual_seed(4))
    alone = encoder.text_tower(["cat"], TEMPLATE)(context)
    assert torch.allclose(tower(context)[:1], alone, atol=1e-5)


def test_every_context_vector_matters_and_features_have_unit_norm(tower):
    context = torch.randn(4, tower.width, generator=torch.Generator().manual_seed(5))
    features = tower(context)
    assert torch.allclose(features.norm(dim=-1), torch.ones(len(CLASSES)), atol=1e-5)
    for position in range(4):
        changed = context.clone()
        changed[position] *= -1
        assert (tower(changed) - features).abs().max() > 1e-3


def test_it_passes_through_vmap_of_grad(tower):
    contexts = torch.randn(3, 4, tower.width, generator=torch.Generator().manual_seed(6))
    weight = torch.randn(len(CLASSES), tower.projection.shape[0])

    def loss(ctx):
        return (tower(ctx) * weight).sum()

    stacked = vmap(grad(loss))(contexts)
    for index in range(3):
        assert torch.allclose(stacked[index], grad(loss)(contexts[index]), atol=1e-5)


def test_room_is_used_up_to_the_last_position_and_not_beyond(tower):
    assert tower(torch.zeros(tower.room, tower.width)).isfinite().all()
    with pytest.raises(SettingsError, match=f"room for {tower.room}: use fewer"):
        tower(torch.zeros(tower.room + 1, tower.width))
    with pytest.raises(SettingsError, match="have width 7"):
        tower(torch.zeros(2, 7))
