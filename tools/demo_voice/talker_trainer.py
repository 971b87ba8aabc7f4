"""The talker's training step: losses on known frames, the update, and the averaged weights."""

import copy
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset, get_worker_info

from deployments.talker.model.layers import DecoderLayer, RMSNorm
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from tools.demo_voice.dataset import END, NONE, Corpus, Sampler, TrainingBatch
from tools.demo_voice.shape import NUM_PHONES, PHONES_PER_FRAME
from tools.demo_voice.teacher_forcing import Guide, Places, input_rows, predictor_logits, talker_hidden
from tools.demo_voice.train_codec import Captured

_SEED = 20
_POSITIONS = 2048
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class TalkerRecipe:
    """Training settings of the talker. Times are in seconds."""

    duration: float
    max_rows: int = 16384  # padded rows per step
    learning_rate: float = 4e-3
    final_learning_rate: float = 2e-5
    warm_up: float = 0.03  # share of the duration
    weight_decay: float = 0.05  # for matrices other than embeddings
    clip: float = 1.0
    dropout: float = 0.1  # rate for the output of the talker's layers
    predictor_dropout: float = 0.05
    wrong_codes: float = 0.12  # maximum share of an utterance's input codes that are replaced, half of it on average
    wrong_frames: float = 0.02  # share of complete frames that are replaced
    hidden_frames: float = 0.5  # maximum share of hidden frames, so earlier speech is not enough to predict the next
    guide_weight: float = 0.3
    full_text: float = 0.5  # share of utterances with all text in the prompt
    num_predicted: int = 4096  # frames per step on which the predictor is trained
    ema: float = 0.999
    ways: int = 4  # different writings of each text
    report_steps: int = 200
    save_every: float = 60
    check_every: float = 60


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch on the talker's device."""

    text: Tensor  # [samples, length]
    codec: Tensor  # [samples, length]
    frames: Tensor  # [samples, length]
    targets: Tensor  # [samples, length]
    text_first: Tensor  # [samples]
    text_count: Tensor  # [samples]
    predicted: Tensor  # [frames]: row numbers over all samples whose frames' other codebooks are predicted

    @classmethod
    def of(cls, tensors: Sequence[Tensor], device: torch.device) -> "DeviceBatch":
        """Copy the result of `batch_tensors` to the device."""
        return cls(*(tensor.to(device) for tensor in tensors))

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy a batch of the same shape to the device. With pinned memory, does not wait for the previous step."""
        for field, tensor in zip(fields(self), tensors, strict=True):
            getattr(self, field.name).copy_(tensor, non_blocking=True)


def batch_tensors(batch: TrainingBatch, *, num_predicted: int, draw: np.random.Generator) -> list[Tensor]:
    """Return the tensors of a `DeviceBatch`. The predictor gets `num_predicted` random frames, or all if it is 0."""
    rows = np.flatnonzero(batch.targets >= 0)
    if num_predicted:
        rows = draw.choice(rows, num_predicted, replace=len(rows) < num_predicted)
    arrays = [getattr(batch, field.name) for field in fields(batch)]
    return [torch.from_numpy(array) for array in (*arrays, np.sort(rows))]


class BatchSource(IterableDataset[list[Tensor]]):
    """Endless batches of a sampler, prepared in separate processes while the GPU trains."""

    def __init__(self, sampler: Sampler, settings: TalkerRecipe, *, seed: tuple[int, ...]) -> None:
        self.sampler, self.settings, self.seed = sampler, settings, seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        gc.freeze()  # the texts are never freed, and consist of millions of objects
        worker = get_worker_info()
        draw = np.random.default_rng((*self.seed, worker.id if worker else 0))
        for batch in self.sampler.batches(self.settings.max_rows, draw=draw):
            yield batch_tensors(batch, num_predicted=self.settings.num_predicted, draw=draw)


class Losses:
    """Cross-entropies of a talker on the frames of the corpus."""

    def __init__(self, corpus: Corpus, config: ModelConfig, device: torch.device) -> None:
        self.codes = torch.from_numpy(corpus.codes).to(device).long()  # [frames, groups]
        self.spoken = torch.from_numpy(corpus.spoken()).to(device)  # [frames]
        # Valid values of codebook 0: a code, or the end of speech, whose number in targets follows the last code.
        self.kept = torch.tensor([*range(config.code_vocab_size), config.codes.eos], device=device)

    def __call__(self, talker: Talker, batch: DeviceBatch, inputs: Tensor) -> Tensor:
        """Return [groups + 1]: mean cross-entropies of the codebooks, and the guide's loss.

        `inputs` [samples, length, groups] are the known frames.
        """
        guide = Guide(self._places(batch))
        hidden = talker_hidden(talker, input_rows(talker, batch.text, batch.codec, inputs), guide)
        first = F.linear(hidden, talker.codec_head.weight.index_select(0, self.kept))
        frames = self.codes[batch.targets.flatten()[batch.predicted]]
        rest = predictor_logits(talker, hidden.index_select(0, batch.predicted), frames)
        entropies = F.cross_entropy(rest.float().flatten(0, 1), frames[:, 1:].flatten(), reduction="none")
        code0 = F.cross_entropy(first.float(), self._first(batch.targets.flatten()), ignore_index=NONE)
        return torch.cat((code0[None], entropies.view(len(frames), -1).mean(0), guide.loss[None]))

    def _first(self, targets: Tensor) -> Tensor:
        """Return [rows]: the index of the right logit among the kept logits, or NONE if nothing is predicted."""
        code0 = self.codes[targets.clamp(min=0), 0]
        return torch.where(targets >= 0, code0, torch.where(targets == END, len(self.kept) - 1, NONE))

    def _places(self, batch: DeviceBatch) -> Places:
        share = torch.where(batch.targets >= 0, self.spoken[batch.targets.clamp(min=0)], 1.0)
        return Places(batch.text_first, batch.text_count, share, batch.targets != NONE)

    def known(self, frames: Tensor) -> Tensor:
        """Return codes [samples, length, groups] of the frames numbered [samples, length]; NONE for missing frames."""
        return torch.where(frames[..., None] >= 0, self.codes[frames.clamp(min=0)], NONE)

    def corrupted(self, known: Tensor, settings: TalkerRecipe) -> Tensor:
        """Return known frames with errors like those of the talker: random codes of the same codebook."""
        samples, length, _ = known.shape
        anywhere = torch.randint(len(self.codes), known.shape, device=known.device)
        others = self.codes.gather(0, anywhere.flatten(0, 1)).view_as(known)
        rates = torch.rand(samples, 1, 1, device=known.device) * settings.wrong_codes
        wrong = torch.rand(known.shape, device=known.device) < rates
        wrong |= torch.rand(samples, length, 1, device=known.device) < settings.wrong_frames
        rates = torch.rand(samples, 1, 1, device=known.device) * settings.hidden_frames
        hidden = torch.rand(samples, length, 1, device=known.device) < rates
        return torch.where(hidden, NONE, torch.where(wrong & (known >= 0), others, known))


class Trainer:
    """The talker in training, its averaged weights, and the elapsed training time."""

    def __init__(self, config: ModelConfig, losses: Losses, settings: TalkerRecipe) -> None:
        self.settings, self.losses = settings, losses
        self.device = losses.codes.device
        torch.manual_seed(_SEED)
        self.talker = initial_talker(config).to(self.device)
        self.talker.prepare(max_positions=_POSITIONS)
        self.averaged = copy.deepcopy(self.talker).requires_grad_(requires_grad=False).eval()
        add_dropout(self.talker, settings)
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.talker, settings),
            lr=torch.zeros((), device=self.device),
            betas=_BETAS,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self._learnt: list[Tensor] = list(self.talker.parameters())
        self._kept: list[Tensor] = list(self.averaged.parameters())
        # On a GPU, each batch shape is captured in a graph, because launching its small operations one by one takes
        # three times as long.
        self._recorded: dict[torch.Size, tuple[DeviceBatch, Captured]] = {}
        self.steps, self.seconds, self.best = 0, 0.0, math.inf

    @property
    def progress(self) -> float:
        """Elapsed share of the training time."""
        return min(1.0, self.seconds / self.settings.duration)

    @property
    def learning_rate(self) -> float:
        settings, progress = self.settings, self.progress
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        rate = settings.final_learning_rate + cosine * (settings.learning_rate - settings.final_learning_rate)
        return rate * min(1.0, (progress + 1e-3) / settings.warm_up)

    def step(self, tensors: Sequence[Tensor]) -> Tensor:
        """Update the weights with a result of `batch_tensors`. Returns the detached losses [groups + 1]."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.learning_rate)
        losses = self._replayed(tensors) if self.device.type == "cuda" else self._update(DeviceBatch(*tensors))
        with torch.no_grad():
            torch._foreach_lerp_(self._kept, self._learnt, max(1 - self.settings.ema, 1 / (self.steps + 2)))
        self.steps += 1
        return losses

    def _replayed(self, tensors: Sequence[Tensor]) -> Tensor:
        shape = tensors[0].shape
        if shape not in self._recorded:
            batch = DeviceBatch.of(tensors, self.device)
            pool = next((recorded.pool for _, recorded in self._recorded.values()), None)
            self._recorded[shape] = batch, Captured(lambda: {"losses": self._update(batch)}, pool=pool)
        batch, recorded = self._recorded[shape]
        batch.fill(tensors)
        return recorded()["losses"].clone()

    def _update(self, batch: DeviceBatch) -> Tensor:
        inputs = self.losses.corrupted(self.losses.known(batch.frames), self.settings)
        with self._autocast():
            losses = self.losses(self.talker, batch, inputs)
        sounds, rest = losses[:PHONES_PER_FRAME], losses[PHONES_PER_FRAME:-1]
        total = sounds.sum() + 2 * rest.mean() + self.settings.guide_weight * losses[-1]
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._learnt, self.settings.clip)
        self.optimizer.step()
        return losses.detach()

    @torch.no_grad()
    def held_out(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the losses [groups + 1] of the averaged weights on a result of `batch_tensors`."""
        batch = DeviceBatch.of(tensors, self.device)
        with self._autocast():
            known = self.losses.known(batch.frames)
            return self.losses(self.averaged, batch, known)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self, file: Path) -> None:
        """Write everything needed to resume the training, and the averaged weights for the export."""
        state = {
            "averaged": self.averaged.state_dict(),
            "best": self.best,
            "talker": self.talker.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.averaged.load_state_dict(state["averaged"])
        self.talker.load_state_dict(state["talker"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.seconds, self.best = state["steps"], state["seconds"], state["best"]

    @torch.no_grad()
    def start_from(self, file: Path) -> None:
        """Start from an earlier talker's weights. Voices that it lacks start as the mean of its voices."""
        weights = torch.load(file, map_location=self.device, weights_only=True)["averaged"]
        table = weights["model.codec_embedding.weight"].float()
        rows = torch.tensor(list(self.talker.config.speakers.values()), device=self.device)
        known = table[rows].any(-1)
        table[rows[~known]] = table[rows[known]].mean(0)
        weights["model.codec_embedding.weight"] = table
        for talker in (self.talker, self.averaged):
            talker.load_state_dict(weights)

    def keep_best(self, held_out: float, file: Path) -> None:
        """Write the averaged weights in half precision if they are the best so far on held-out utterances."""
        if held_out >= self.best:
            return
        self.best = held_out
        weights = {name: tensor.half() for name, tensor in self.averaged.state_dict().items()}
        state = {"averaged": weights, "steps": self.steps, "held_out": held_out}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)


def initial_talker(config: ModelConfig) -> Talker:
    """Return a talker with random weights that keep signals near 1. Table rows that are never used are zero."""
    talker = Talker(config)
    for module in talker.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
    for stack in (talker.model, talker.code_predictor.model):
        for layer in stack.layers:
            assert isinstance(layer, DecoderLayer)
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.data.mul_((2 * len(stack.layers)) ** -0.5)
    for head in (talker.codec_head, *talker.code_predictor.lm_head):
        nn.init.normal_(head.weight, std=0.02)
    _clear_unused(talker)
    return talker


@torch.no_grad()
def _clear_unused(talker: Talker) -> None:
    """Set rows without a sound, tag or voice to zero. Equal rows compress well, and training keeps them equal."""
    config = talker.config
    codes = config.codes
    tags = {codes.pad, codes.bos, codes.think, codes.nothink, codes.think_bos, codes.think_eos}
    named = {*config.languages.values(), *config.speakers.values()}
    sounds = set(range(NUM_PHONES))
    _keep_rows(talker.codec_head.weight, sounds | {codes.eos})
    _keep_rows(talker.model.codec_embedding.weight, sounds | {codes.eos} | tags | named)
    predictor = talker.code_predictor
    for group in range(PHONES_PER_FRAME - 1):
        _keep_rows(predictor.lm_head[group].weight, sounds)  # type: ignore[arg-type]
        _keep_rows(predictor.embeddings[group].weight, sounds)  # type: ignore[arg-type]


def _keep_rows(weight: Tensor, kept: set[int]) -> None:
    weight[[row for row in range(len(weight)) if row not in kept]] = 0


def add_dropout(talker: Talker, settings: TalkerRecipe) -> None:
    """Apply dropout to each layer's contribution to the residual stream while the module is training."""
    for stack, rate in ((talker.model, settings.dropout), (talker.code_predictor.model, settings.predictor_dropout)):
        for layer in stack.layers:
            assert isinstance(layer, DecoderLayer)
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_hook(_dropout(rate))


def _dropout(rate: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, _, output: F.dropout(output, rate, module.training)


def _parameter_groups(talker: Talker, settings: TalkerRecipe) -> list[dict[str, object]]:
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in talker.named_parameters():
        (decayed if parameter.dim() > 1 and "embedding" not in name else free).append(parameter)
    return [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": free, "weight_decay": 0.0}]
