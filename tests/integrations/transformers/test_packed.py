"""Packed sequences: each gives what it gives alone, however they are described."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.integrations import transformers as integration
from openkda.integrations.transformers import packed

LENGTHS = (3, 70, 1, 40)  # shorter than the convolution, longer than a chunk, one token
Close = Callable[..., None]


@pytest.fixture(autouse=True)
def on(off: None) -> None:
    integration.enable()


@pytest.fixture
def documents(tokens: Tensor) -> list[Tensor]:
    return list(tokens[0, : sum(LENGTHS)].split(LENGTHS))


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": positions(*LENGTHS)},
    "cu_seqlens": {"cu_seqlens": offsets(*LENGTHS)},
    "cu_seqlens-int64-empty": {"cu_seqlens": offsets(3, 0, 70, 1, 40, 0, dtype=torch.int64)},
    "seq_idx": {"seq_idx": torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None].int()},
    "flash": {"cu_seq_lens_q": offsets(*LENGTHS), "cu_seq_lens_k": offsets(*LENGTHS), "max_length_q": 70},
    "all": {
        "position_ids": positions(*LENGTHS),
        "cu_seqlens": offsets(*LENGTHS),
        "seq_idx": torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None].int(),
    },
    "with-mask-of-ones": {"position_ids": positions(*LENGTHS), "attention_mask": torch.ones(1, sum(LENGTHS))},
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_packed_equals_separate(
    description: str, training: bool, kimi_linear: Any, documents: list[Tensor], close: Close
):
    kimi_linear.train(training)  # in eval mode transformers makes a cache unless told otherwise

    def gradients(logits: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(logits.square().sum(), tuple(kimi_linear.model.parameters()), allow_unused=True)

    want = torch.cat([kimi_linear(d[None]).logits for d in documents], dim=1)
    described = {
        k: v.to(kimi_linear.device) if isinstance(v, Tensor) else v for k, v in DESCRIPTIONS[description].items()
    }
    got = kimi_linear(torch.cat(documents)[None], **described).logits
    close(got, want, 1e-5)
    if training:
        for a, b in zip(gradients(got), gradients(want), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                close(a, b)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_leaks_from_one_document_to_another(attention: str, kimi_linear: Any, documents: list[Tensor]):
    kimi_linear.set_attn_implementation(attention)
    embeds = kimi_linear.model.embed_tokens(torch.cat(documents)[None]).detach().requires_grad_()
    logits = kimi_linear(inputs_embeds=embeds, position_ids=positions(*LENGTHS)).logits
    logits[:, 3:73].square().sum().backward()
    touched = embeds.grad[0].abs().amax(-1) > 0
    assert touched[3:73].all()
    assert not touched[:3].any()
    assert not touched[73:].any()


def test_upstream_leaks_or_raises(kimi_linear: Any, documents: list[Tensor]):
    # Why this part exists; when it fails, transformers has learnt it.
    integration.disable()
    row, separate = torch.cat(documents)[None], kimi_linear(documents[1][None]).logits
    leaked = kimi_linear(row, position_ids=positions(*LENGTHS), use_cache=False).logits[:, 3:73]
    assert (leaked - separate).abs().max() > 1e-2
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        kimi_linear(row, cu_seqlens=offsets(*LENGTHS))


def test_rows_may_be_packed_differently(kimi_linear: Any, tokens: Tensor, close: Close):
    position_ids = torch.cat([positions(100, 50), positions(20, 130)])
    got = kimi_linear(tokens, position_ids=position_ids).logits
    for row, lengths in enumerate([(100, 50), (20, 130)]):
        want = torch.cat([kimi_linear(d[None]).logits for d in tokens[row].split(lengths)], dim=1)
        close(got[row : row + 1], want, 1e-5)


def test_padding_of_a_packed_row_touches_nothing(kimi_linear: Any, tokens: Tensor, close: Close):
    mask = torch.ones_like(tokens)
    mask[1, 110:] = 0
    position_ids = torch.cat([positions(100, 50), positions(20, 90, 40)])
    got = kimi_linear(tokens, position_ids=position_ids, attention_mask=mask).logits
    close(got[:1, 100:], kimi_linear(tokens[:1, 100:]).logits, 1e-5)
    close(got[1:, 20:110], kimi_linear(tokens[1:, 20:110]).logits, 1e-5)
    kimi_linear.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention_mask must be None for packed sequences with flash attention"):
        kimi_linear(tokens, position_ids=position_ids, attention_mask=mask)


def test_tokens_after_the_last_offset_are_padding(kimi_linear: Any, tokens: Tensor, close: Close):
    got = kimi_linear(tokens[:1], cu_seqlens=offsets(30, 50)).logits
    close(got[:, 30:80], kimi_linear(tokens[:1, 30:80]).logits, 1e-5)


def test_flattening_collator_trains_as_padding_does(kimi_linear: Any, documents: list[Tensor], close: Close):
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = flatten([{"input_ids": d.tolist()} for d in documents], return_tensors="pt")
    got = kimi_linear(**batch).loss
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
    want = kimi_linear(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_positions_of_plain_rows_are_not_packed(kimi_linear: Any, tokens: Tensor):
    # As generation numbers a row with padding on the left: 1 where padding is, then 0, 1, 2, ...
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert packed.from_positions(position_ids, mask, 2) is None
    assert packed.from_positions(torch.arange(7, 20)[None], None, 2) is None
    assert packed.from_positions(position_ids, None, 2) is not None


@pytest.mark.parametrize("use", ["cache", "use_cache"])
def test_packed_sequences_refuse_a_cache(use: str, kimi_linear: Any, documents: list[Tensor]):
    from transformers import DynamicCache

    option: Any = {"use_cache": True} if use == "use_cache" else {"cache": DynamicCache(config=kimi_linear.config)}
    with pytest.raises(ValueError, match="KimiLinearModel: cache must be None with packed sequences"):
        kimi_linear(torch.cat(documents)[None], cu_seqlens=offsets(*LENGTHS), **option)
    layer = kimi_linear.model.layers[0].self_attn
    with pytest.raises(ValueError, match="KimiLinearDeltaAttention: cache must be None with packed sequences"):
        layer(torch.zeros(1, 4, 32), cache=DynamicCache(config=kimi_linear.config), cu_seqlens=offsets(1, 3))


def test_wrong_descriptions_are_named(kimi_linear: Any, tokens: Tensor):
    with pytest.raises(ValueError, match="KimiLinearModel: batch size must be 1 with cu_seqlens"):
        kimi_linear(tokens, cu_seqlens=offsets(100, 50))
    with pytest.raises(ValueError, match=r"KimiLinearModel: seq_idx must have shape \[B, T\] = \[2, 150\]"):
        kimi_linear(tokens, seq_idx=torch.zeros(1, 150, dtype=torch.int32))


def test_layer_alone_takes_offsets_or_seq_idx(kimi_linear: Any, close: Close):
    layer, x = kimi_linear.model.layers[0].self_attn, torch.randn(1, 9, 32)
    want = torch.cat([layer(part) for part in x.split([4, 5], dim=1)], dim=1)
    close(layer(x, cu_seqlens=offsets(4, 5)), want, 1e-5)
    close(layer(x, seq_idx=torch.tensor([[7] * 4 + [2] * 5])), want, 1e-5)
