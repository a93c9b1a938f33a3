"""transformers' Trainer on a Kimi Linear, with its KDA layers on openkda's operators. Needs openkda[transformers].

    python examples/finetune_transformers.py                # about a minute on a CPU
    python examples/finetune_transformers.py --plain        # transformers' own operators: the same losses, slower
    python examples/finetune_transformers.py --packed       # many short texts in a row, none of which sees another
    python examples/finetune_transformers.py --model DIR    # a checkpoint of yours instead of a tiny new model

One line turns it on, before or after the model is made; model, checkpoints, Trainer and generate() stay transformers'.
The text is the language reference that ships with Python, as bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    DataCollatorWithFlattening,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from openkda.integrations import transformers as openkda_transformers

BEGIN, END, PAD, VOCABULARY = 256, 257, 258, 260  # after the 256 bytes


def tiny_model() -> KimiLinearForCausalLM:
    """Two KDA layers and one of full attention; the second and third have four experts each."""
    config = KimiLinearConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, num_local_experts=4, num_experts_per_tok=2, bos_token_id=BEGIN, eos_token_id=END,
        pad_token_id=PAD,
        linear_attn_config={"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 2],
                            "full_attn_layers": [3]},
    )  # fmt: skip
    return KimiLinearForCausalLM(config)


def blocks(length: int) -> list[dict[str, list[int]]]:
    """The text cut into blocks of equal length."""
    text = list("\n".join(topics.values()).encode())
    return [{"input_ids": b, "labels": b} for b in (text[i : i + length] for i in range(0, len(text) - length, length))]


def paragraphs(longest: int) -> list[dict[str, list[int]]]:
    """Its paragraphs, each a text of its own."""
    texts = [p.strip().encode()[:longest] for topic in topics.values() for p in topic.split("\n\n")]
    return [{"input_ids": [BEGIN, *text, END]} for text in texts if len(text) > 20]


class Losses(Trainer):
    """Keeps the loss of every step as it is; the log rounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, continue a prompt, and return the loss of every step in nats a token."""
    parser = argparse.ArgumentParser(description="fine-tune Kimi Linear with transformers' Trainer")
    parser.add_argument("--model", help="folder of a checkpoint that transformers can load")
    parser.add_argument("--plain", action="store_true", help="without openkda")
    parser.add_argument("--packed", action="store_true", help="paragraphs packed into rows, instead of equal blocks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help="bytes of a block, and of the longest paragraph")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    with nullcontext() if options.plain else openkda_transformers.enabled():
        set_seed(options.seed)
        model = KimiLinearForCausalLM.from_pretrained(options.model) if options.model else tiny_model()
        with tempfile.TemporaryDirectory() as folder:  # the Trainer wants one, and is told to write nothing
            trainer = Losses(
                model=model,
                args=TrainingArguments(
                    output_dir=folder,
                    max_steps=options.steps,
                    per_device_train_batch_size=4,
                    learning_rate=3e-3,
                    lr_scheduler_type="constant",
                    logging_steps=10,
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                    dataloader_pin_memory=torch.cuda.is_available(),
                    seed=options.seed,
                ),
                train_dataset=paragraphs(options.length) if options.packed else blocks(options.length),
                data_collator=DataCollatorWithFlattening() if options.packed else default_data_collator,
            )
            trainer.train()
        prompt = torch.tensor([list(b"The import statement")], device=model.device)
        text = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    print(bytes(token for token in text[0].tolist() if token < 256).decode(errors="replace"))
    return trainer.losses


if __name__ == "__main__":
    main()
