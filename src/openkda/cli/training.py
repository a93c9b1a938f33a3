"""Run torchtitan's trainer for `openkda train`: configuration in, console out. Imports torch; train.py does not."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.metrics import BaseLogger, LoggerContainer, _get_metrics_rank
from torchtitan.observability import structured_logger
from torchtitan.trainer import Trainer

from openkda.cli import bigram
from openkda.cli.configuration import checkpoint_fault, load_config, one_line
from openkda.cli.errors import INTERRUPTED, UserError
from openkda.cli.process import environment, log_file, signals, tidy
from openkda.cli.progress import Progress
from openkda.cli.train import Request
from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.data import TextDataLoader, check_length, count_heldout, first_bytes, load_corpus
from openkda.integrations.torchtitan.documents import DataError


def train(request: Request) -> int:
    """Train, or go on training, and say how it went. Returns the exit code."""
    cpu.install()
    try:
        config = load_config(request)
        if request.resume_step is not None and request.resume_step >= config.training.steps:
            at = f"step {request.resume_step} of {config.training.steps}"
            raise UserError(f"{request.output} is already at {at}; ask for more with --steps")
        text = _describe_text(config)
        _make_folder(request.output)
        with environment(), log_file(request.output, verbose=request.verbose) as log, tidy():
            structured_logger.init_structured_logger(
                source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
            )
            trainer = _build(config, log)
            try:
                return _Session(trainer, request, text, log).go()
            finally:
                trainer.close()
    except DataError as error:
        raise UserError(str(error)) from error
    except CheckpointException as error:  # no Exception, but a BaseException
        raise UserError(
            f"a checkpoint in {request.output} cannot be read or written: {checkpoint_fault(error)}"
        ) from error
    except RuntimeError as error:
        if "Loss is not finite" not in str(error):
            raise
        raise UserError(f"{one_line(error)} Try a smaller learning rate.") from error


def _make_folder(folder: Path) -> None:
    """Make the output folder, and see that files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written to: {error.strerror}") from error


def _build(config: Trainer.Config, log: Path) -> Any:
    owner = type(config)._owner
    assert owner is not None
    try:
        return _stoppable(owner)(config)
    except DataError:
        raise
    except (ValueError, NotImplementedError, AssertionError) as error:  # torchtitan's checks of option against option
        logging.getLogger(__name__).exception("building the trainer failed")
        raise UserError(f"{one_line(error)} (details in {log})") from error


def _stoppable(trainer: type[Any]) -> type[Any]:
    """torchtitan's trainer class, with a way to leave its loop early and a call before its first step."""

    class Stoppable(trainer):
        stop_requested = False
        before_first_step: Any = None

        def should_continue_training(self) -> bool:
            if self.before_first_step is not None:  # the checkpoint is loaded by now, and no step is taken yet
                call, self.before_first_step = self.before_first_step, None
                call()
            return super().should_continue_training() and not self._all_stop()

        def _all_stop(self) -> bool:
            """Whether any rank was told to stop. All must agree, or the others would wait for it for ever."""
            if dist.get_world_size() == 1:
                return self.stop_requested
            if self.step % self.config.metrics.log_freq:  # asked as often as the loss is read, which waits anyway
                return False
            flag = torch.tensor(int(self.stop_requested), device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            self.stop_requested = bool(flag)
            return self.stop_requested

    return Stoppable


@dataclasses.dataclass(frozen=True)
class _Text:
    """What is known about the text before training."""

    summary: str
    labels_per_byte: float
    bigram_bits: float


def _describe_text(config: Trainer.Config) -> _Text:
    loader = config.validator.dataloader
    assert isinstance(loader, TextDataLoader.Config)
    corpus = load_corpus(loader.dataset_path, loader.heldout_fraction)
    measured = first_bytes(corpus.heldout, loader.heldout_bytes)
    if not measured:
        raise DataError(f"{loader.dataset_path}: is too short to hold text out")
    tokenizer = config.tokenizer.build(tokenizer_path="")
    check_length(corpus.train, tokenizer, config.training.seq_len, loader.dataset_path or "default text")
    labels, size = count_heldout(loader, tokenizer)
    train_texts = (corpus.train[i].text for i in range(len(corpus.train)))
    return _Text(
        summary=f"{_count(len(corpus.train), 'document')} to train on, {_count(size, 'byte')} held out",
        labels_per_byte=labels / size,
        bigram_bits=bigram.bits_per_byte(train_texts, (d.text for d in measured)),
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class _Session:
    """One training run as the user sees it: lines before, a progress line during, one line at the end."""

    def __init__(self, trainer: Any, request: Request, text: _Text, log: Path) -> None:
        self.trainer, self.request, self.text, self.log = trainer, request, text, log
        config = trainer.config
        rank = _get_metrics_rank(
            parallel_dims=trainer.parallel_dims, pp_schedule=config.parallelism.pipeline_parallel_schedule
        )
        self.progress = Progress(config.training.steps, quiet=dist.get_rank() != rank)
        self.metrics = _Metrics(self)
        self.tensorboard: BaseLogger = trainer.metrics_processor.logger
        self.folder = Path(config.dump_folder) / config.checkpoint.folder
        self.start_step = 0

    def go(self) -> int:
        trainer, say = self.trainer, self.progress.say
        loggers = LoggerContainer()
        loggers.add_logger(self.tensorboard)
        loggers.add_logger(self.metrics)
        trainer.metrics_processor.logger = loggers
        trainer.before_first_step = self._begin
        with signals(self._stop):
            try:
                trainer.train()
            finally:
                self.progress.stop()
            if trainer.stop_requested and trainer.step < trainer.config.training.steps:
                code = self._interrupted()
                if dist.get_world_size() > 1:
                    dist.barrier()  # a launcher stops all ranks when the first one leaves
                return code
            if self.metrics.heldout_step != trainer.step:
                self._evaluate(f"after {trainer.step} steps")
        m = self.metrics
        say(
            f"openkda train: loss {m.first_loss:.4f} -> {m.last_loss:.4f}, {m.heldout_bits:.3f} bits/byte on held-out "
            f"text, {m.mean_tokens_per_s:,.0f} tokens/s, checkpoint {self.folder / f'step-{trainer.step}'}"
        )
        return 0

    def _begin(self) -> None:
        """After the checkpoint is loaded, before the first step."""
        trainer, request = self.trainer, self.request
        self.start_step = trainer.step
        if dist.get_rank() == 0:
            request.record().save(self.folder, request.tokenizer)
        parameters = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
        source = request.data or "the reference topics of Python"
        say = self.progress.say
        say(f"{request.config}: {parameters:,} parameters; text: {source}, {self.text.summary}")
        say(
            f"output: {request.output} (log in {self.log.name}, TensorBoard in {trainer.config.metrics.save_tb_folder})"
        )
        if self.start_step:
            say(f"resumed from step {self.start_step}")
        if trainer.should_continue_training():
            self._evaluate(f"before step {self.start_step + 1}")
            self.progress.start()
        self.metrics.start(self.start_step)

    def _evaluate(self, when: str) -> None:
        self.metrics.label = when
        self.trainer.validator.validate(self.trainer.model_parts, self.trainer.step)

    def _stop(self) -> None:
        self.trainer.stop_requested = True
        with contextlib.suppress(RuntimeError):  # the signal came while this very stream was being written to
            self.progress.say("stopping after this step, with a checkpoint; press Ctrl-C again to leave at once")

    def _interrupted(self) -> int:
        trainer, say = self.trainer, self.progress.say
        if trainer.step == self.start_step:
            say("openkda train: stopped before the first step; nothing to save")
            return INTERRUPTED
        trainer.checkpointer.save(trainer.step, last_step=True)
        trainer.checkpointer.maybe_wait_for_saving()
        say(
            f"openkda train: stopped at step {trainer.step} of {trainer.config.training.steps}, checkpoint "
            f"{self.folder / f'step-{trainer.step}'}; go on with: openkda train --resume {self.request.output}"
        )
        return INTERRUPTED


class _Metrics(BaseLogger):
    """Receives what torchtitan logs and turns it into the progress line and the figures of the last line."""

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.first_loss = self.last_loss = self.heldout_bits = math.nan
        self.heldout_step = -1
        self.label: str | None = None
        self.tokens, self.seconds, self.steps = 0.0, 0.0, 0

    def start(self, step: int) -> None:
        self.step = step

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "validation_metrics/loss" in metrics:
            self._log_heldout(metrics["validation_metrics/loss"], step)
        elif "loss_metrics/global_avg_loss" in metrics:
            self._log_training(metrics, step)

    @property
    def mean_tokens_per_s(self) -> float:
        """Over the whole run, all ranks together, the time for measuring on held-out text left out."""
        return self.tokens / self.seconds if self.seconds else math.nan

    def _log_training(self, metrics: dict[str, Any], step: int) -> None:
        session = self.session
        loss = metrics["loss_metrics/global_avg_loss"]
        if math.isnan(self.first_loss):
            self.first_loss = loss
        self.last_loss = loss
        steps, self.step = step - self.step, step
        # torchtitan's figure is per device of a data-parallel rank's group; the ranks together see this many tokens a
        # second.
        tokens_per_s = metrics["throughput(tps)"] * dist.get_world_size()
        seconds = metrics["time_metrics/end_to_end(s)"] * session.trainer.config.metrics.log_freq
        self.tokens, self.seconds, self.steps = (
            self.tokens + tokens_per_s * seconds,
            self.seconds + seconds,
            self.steps + steps,
        )
        session.progress.update(
            step,
            loss=loss,
            bits=loss / math.log(2) * session.text.labels_per_byte,
            tokens_per_s=tokens_per_s,
            eta_s=(session.progress.total - step) * self.seconds / self.steps,
        )

    def _log_heldout(self, loss: float, step: int) -> None:
        session = self.session
        self.heldout_bits = loss / math.log(2) * session.text.labels_per_byte
        self.heldout_step = step
        when, self.label = self.label or f"after {step} steps", None
        session.progress.say(
            f"held-out text, {when}: {self.heldout_bits:.3f} bits/byte (a bigram model: {session.text.bigram_bits:.3f})"
        )
        session.tensorboard.log({"heldout/bits_per_byte": self.heldout_bits}, step)
