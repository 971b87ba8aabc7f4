import pytest
import torch

from tools.demo_voice.codec_model import CodecModel, served
from tools.demo_voice.judges import SoundClassifier, sound_loss
from tools.demo_voice.shape import NUM_PHONES, PHONES_PER_FRAME, codec_config

FRAMES = 6


@pytest.fixture(scope="module")
def model() -> CodecModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CodecModel(codec_config())
    model.initialise(torch.randn(40, FRAMES * model.config.frame_samples))
    return model


def utterances(model: CodecModel) -> tuple[torch.Tensor, torch.Tensor]:
    audio = torch.randn(2, FRAMES * model.config.frame_samples)
    return audio, torch.randint(NUM_PHONES, (2, FRAMES, PHONES_PER_FRAME))


def test_codes_begin_with_the_sounds(model: CodecModel) -> None:
    audio, phones = utterances(model)
    codes = model.codes(audio, phones)
    assert codes.shape == (2, FRAMES, model.config.num_code_groups)
    assert torch.equal(codes[..., :PHONES_PER_FRAME], phones)


def test_the_served_decoder_makes_of_codes_what_training_hears(model: CodecModel) -> None:
    audio, phones = utterances(model)
    codes = model.codes(audio, phones)  # before the step below moves the codebooks
    decoder = served(model, "cpu")
    with torch.no_grad():
        trained = model(audio, phones, dead=torch.tensor(0.0)).audio.clamp(-1, 1)
    decoded, _ = decoder.decode(codes, [decoder.initial_state()] * 2)
    torch.testing.assert_close(decoded, trained, atol=1e-4, rtol=1e-3)


def test_training_moves_sounds_and_the_rest(model: CodecModel) -> None:
    audio, phones = utterances(model)
    entries = model.stages[0].codebook.table().clone()
    result = model(audio, phones, dead=torch.tensor(0.0))
    torch.autograd.backward(result.audio.square().mean() + result.commitment)
    assert all(codebook.embedding_sum.grad is not None for codebook in model.sounds)
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())
    assert not torch.equal(model.stages[0].codebook.table(), entries)


def test_once_the_corpus_is_encoded_only_the_decoder_learns(model: CodecModel) -> None:
    audio, phones = utterances(model)
    codes = model.codes(audio, phones)
    model.zero_grad(set_to_none=True)
    result = model(audio, phones, dead=None)
    torch.autograd.backward(result.audio.square().mean() + result.commitment)
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert all(codebook.embedding_sum.grad is not None for codebook in model.sounds)
    assert torch.equal(model.codes(audio, phones), codes)


def test_a_sound_that_is_not_heard_costs(model: CodecModel) -> None:
    """After some steps on two windows the classifier knows their sounds, and tells one from the other."""
    torch.manual_seed(1)
    audio = torch.randn(2, FRAMES * model.config.frame_samples) * torch.tensor([[0.01], [1.0]])
    phones = torch.tensor([3, 7])[:, None, None].expand(2, FRAMES, PHONES_PER_FRAME)
    classifier = SoundClassifier(model.config.sample_rate)
    optimizer = torch.optim.AdamW(classifier.parameters(), 1e-3)
    for _ in range(12):
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(classifier(audio)[-1], phones.flatten(1)))
        optimizer.step()
    same, other = sound_loss(classifier, audio, audio, phones), sound_loss(classifier, audio, audio.flip(0), phones)
    assert same.features == 0
    assert other.score > same.score + 1
    assert other.features > 0.1
